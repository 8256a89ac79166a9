"""Pure functions from logits to logits or weights, [S, vocab] float32 or float64: the sampler's stages before the draw.

None reads a value back to the host or makes a shape depend on a value.
"""

from __future__ import annotations

import torch

from minisgl.engine.sampling import BiasStage, ConstraintStage, MaskStage, PenaltyStage, TokenHistory, TopStage

_NEG_INF = float("-inf")


def add_bias(logits: torch.Tensor, stage: BiasStage[torch.Tensor]) -> torch.Tensor:
    """Add each bias to its logit."""
    return logits.index_put((stage.rows, stage.tokens), stage.values.to(logits.dtype), accumulate=True)


def mask_tokens(logits: torch.Tensor, stage: MaskStage[torch.Tensor]) -> torch.Tensor:
    """Set the logits of forbidden tokens to −inf."""
    return logits.index_put((stage.rows, stage.tokens), logits.new_full((), _NEG_INF))


def constrain(logits: torch.Tensor, stage: ConstraintStage[torch.Tensor]) -> torch.Tensor:
    """Set the logits of all tokens that a constrained row's mask does not allow to −inf."""
    bits = torch.arange(8, dtype=torch.uint8, device=logits.device)
    masks = stage.masks.view(torch.uint8).view(len(stage.rows), -1, 1)  # bytes, as they take the least memory unpacked
    allowed = (masks >> bits & 1).bool().flatten(1)[:, : logits.shape[-1]]
    return logits.index_put((stage.rows,), logits[stage.rows].masked_fill(~allowed, _NEG_INF))


def count_tokens(history: TokenHistory, vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Count from the token table how often each token was generated, and tell whether it occurs at all.

    Returns the occurrences in the output, [P, vocab] of ``dtype``, and whether a token is in the prompt or the output,
    [P, vocab] bool.
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
    """Apply the three penalties to the P rows of the stage.

    Repetition first, on prompt and output: positive logits are divided by it, negative ones multiplied (CTRL, Keskar et
    al. 2019). Then frequency × occurrences and, for tokens that occur, presence are subtracted; output only (OpenAI).
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

    ``temperature`` is [S], positive. A logit of −inf gives 0, but a row of nothing else gives NaN.
    """
    return ((logits - logits.amax(-1, keepdim=True)) / temperature.unsqueeze(-1)).exp()


def keep_top(weights: torch.Tensor, logits: torch.Tensor, stage: TopStage[torch.Tensor]) -> torch.Tensor:
    """Set the weights of tokens outside of top-k or top-p to 0, in the F rows of the stage.

    Top-k keeps the k likeliest tokens. Top-p keeps the fewest of those, at least one, whose weights add up to ``top_p``
    of what top-k kept (nucleus sampling, Holtzman et al. 2020). Among equal logits the lower ids stay, so ``top_k=1``
    is greedy. ``weights`` are those that `softmax_weights` made from ``logits``, [S, vocab] both.
    """
    rows_logits, rows_weights = logits[stage.rows], weights[stage.rows]
    # Find n among the sorted logits, of which the largest max_top_k suffice.
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
    """Set weights, [S, vocab] with 1 for the likeliest token, below ``min_p``, [S], to 0 (Nguyen et al. 2024)."""
    return weights.masked_fill(weights < min_p.unsqueeze(-1), 0.0)
