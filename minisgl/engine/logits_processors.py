"""The stages between the model's logits and the draw, each a pure function on the device.

None of them changes its arguments, reads a value back to the host or makes a shape depend on one.
"""

from __future__ import annotations

import torch

from minisgl.engine.sampling import BiasStage, ConstraintStage, MaskStage, PenaltyStage, TokenHistory, TopStage

_NEG_INF = float("-inf")


def add_bias(logits: torch.Tensor, stage: BiasStage[torch.Tensor]) -> torch.Tensor:
    """Add each bias to its logit; [S, vocab] float32 or float64 in and out."""
    return logits.index_put((stage.rows, stage.tokens), stage.values.to(logits.dtype), accumulate=True)


def mask_tokens(logits: torch.Tensor, stage: MaskStage[torch.Tensor]) -> torch.Tensor:
    """Set the logits of forbidden tokens to −inf; [S, vocab] in and out."""
    return logits.index_put((stage.rows, stage.tokens), logits.new_full((), _NEG_INF))


def constrain(logits: torch.Tensor, stage: ConstraintStage[torch.Tensor]) -> torch.Tensor:
    """Leave the constrained rows the tokens of their masks, and set all others to −inf; [S, vocab] in and out."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    masks = stage.masks.view(torch.uint8).view(len(stage.rows), -1, 1)  # bytes, as they take the least memory unpacked
    allowed = (masks >> bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
    return logits.index_put((stage.rows,), logits[stage.rows].masked_fill(~allowed, _NEG_INF))


def count_tokens(history: TokenHistory, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """How often each token was generated, and whether it occurs at all, built from the token table.

    The counts are whole numbers in floating point, so the order of the atomic additions does not matter.

    Args:
        history: of P rows.
        vocab: vocabulary size.
        dtype: of the counts.

    Returns:
        generated: [P, vocab] occurrences in the output.
        seen: [P, vocab] bool, True if in the prompt or the output.
    """
    tokens = history.tokens[history.slots, : history.max_token_len]
    position = torch.arange(history.max_token_len, device=tokens.device)
    exists = position < history.token_len.unsqueeze(-1)
    is_output = exists & (position >= history.prompt_len.unsqueeze(-1))
    index = tokens.masked_fill(~exists, 0).long()
    zeros = torch.zeros(len(tokens), vocab, dtype=dtype, device=tokens.device)
    generated = zeros.scatter_add(-1, index, is_output.to(dtype))
    seen = zeros.scatter_add(-1, index, exists.to(dtype)) > 0
    return generated, seen


def penalise(logits: torch.Tensor, stage: PenaltyStage[torch.Tensor], history: TokenHistory) -> torch.Tensor:
    """Apply the three penalties.

    Repetition comes first, on prompt and output: positive logits are divided by it, negative ones multiplied (CTRL,
    Keskar et al. 2019). Then frequency × occurrences and, for every token that occurs, presence are subtracted; these
    two count the output only (OpenAI's definition).

    Args:
        logits: [S, vocab] float32 or float64.
        stage: names P of the rows.
        history: tokens of those P rows.
    """
    generated, seen = count_tokens(history, logits.shape[-1], logits.dtype)
    rows = logits[stage.rows]
    repetition = stage.repetition.unsqueeze(-1)
    repeated = torch.where(rows > 0, rows / repetition, rows * repetition)
    rows = torch.where(seen, repeated, rows)
    rows = rows - stage.frequency.unsqueeze(-1) * generated - stage.presence.unsqueeze(-1) * (generated > 0)
    return logits.index_put((stage.rows,), rows)


def softmax_weights(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """``exp((logit − largest logit) / temperature)``: softmax up to a factor, 1 for the likeliest token.

    Args:
        logits: [S, vocab] float32 or float64; −inf gives 0, but a row of nothing else gives NaN.
        temperature: [S], positive.
    """
    return ((logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)).exp()


def keep_top(weights: torch.Tensor, logits: torch.Tensor, stage: TopStage[torch.Tensor]) -> torch.Tensor:
    """Set the weights of tokens outside of top-k or top-p to 0.

    Top-k leaves the k likeliest tokens. Top-p leaves the fewest of those whose weights add up to ``top_p`` of what
    top-k left (nucleus sampling, Holtzman et al. 2020), at least one. Either way the n likeliest tokens stay, for some
    n a row; among equal logits the lower token ids do, so that exactly n stay and ``top_k=1`` is greedy.

    The n are found among the sorted logits, of which the largest ``max_top_k`` suffice.

    Args:
        weights: [S, vocab] from `softmax_weights`.
        logits: [S, vocab] that the weights were made from, for the order.
        stage: names F of the rows.
    """
    rows_logits, rows_weights = logits[stage.rows], weights[stage.rows]
    candidates, ids = rows_logits.topk(min(stage.max_top_k, logits.shape[-1]))
    rank = torch.arange(candidates.shape[-1], device=logits.device)
    in_top_k = rank < stage.top_k.unsqueeze(-1)
    mass = rows_weights.gather(-1, ids).masked_fill(~in_top_k, 0.0).double()
    sums = mass.cumsum(-1)
    before = sums - mass
    limit = stage.top_p.unsqueeze(-1) * sums[:, -1:]
    count = (in_top_k & (before < limit)).sum(-1, keepdim=True).clamp(min=1)

    threshold = candidates.gather(-1, count - 1)
    above = rows_logits > threshold
    tied = rows_logits == threshold
    room = count - above.sum(-1, keepdim=True)
    keep = above | (tied & (tied.cumsum(-1, dtype=torch.int32) <= room))
    return weights.index_put((stage.rows,), rows_weights.masked_fill(~keep, 0.0))


def keep_min_p(weights: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set weights under ``min_p`` of the likeliest token's to 0 (Nguyen et al. 2024).

    Args:
        weights: [S, vocab] from `softmax_weights`, so that the likeliest weighs 1.
        min_p: [S] in [0, 1].
    """
    return weights.masked_fill(weights < min_p.unsqueeze(-1), 0.0)
