"""Log-probabilities: taken on the device beside the tokens, turned into `TokenLogprobs` on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from minisgl.engine.logits_processors import (
    add_bias,
    constrain,
    keep_min_p,
    keep_top,
    mask_tokens,
    penalise,
    softmax_weights,
)
from minisgl.engine.random import draw
from minisgl.engine.sampling import A, DeviceSampling, HostSampling, LogprobStage, RandomStage, TokenHistory
from minisgl.registry import Registry
from minisgl.request import Int32Array, TokenLogprobs


class Logprobs(NamedTuple, Generic[A]):
    """Log-probabilities of the L rows that asked, in the order of ``LogprobStage.rows``; K is its ``max_count``.

    Args:
        sampled: [L] of the sampled token.
        top: [L, K] of the likeliest tokens, best first.
        top_ids: [L, K] int32 their ids.
    """

    sampled: A
    top: A
    top_ids: A


def take_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, stage: LogprobStage[torch.Tensor]
) -> Logprobs[torch.Tensor]:
    """Log-softmax of the rows that asked, at the sampled and at the likeliest tokens.

    Args:
        logits: [S, vocab] as the model gave them, before any stage.
        tokens: [S] int64 sampled tokens.
        stage: names L of the rows.
    """
    rows = logits[stage.rows]
    if rows.dtype != torch.float64:
        rows = rows.float()
    normaliser = rows.logsumexp(-1, keepdim=True)
    sampled = rows.gather(-1, tokens[stage.rows].unsqueeze(-1)) - normaliser
    top, top_ids = rows.topk(min(stage.max_count, rows.shape[-1]))
    return Logprobs(sampled.squeeze(-1), top - normaliser, top_ids.int())


def token_logprobs(
    rows: HostSampling, tokens: Int32Array, logprobs: Logprobs[npt.NDArray[Any]] | None
) -> list[TokenLogprobs | None] | None:
    """Log-probabilities of a step for its requests.

    Args:
        rows: what the step was sampled with.
        tokens: int32[S] the step's tokens.
        logprobs: host copy of what the sampler returned.

    Returns:
        [S] entries, None for a row that did not ask; or None if no row asked. Equally likely tokens are listed in the
        order of their ids.
    """
    stage = rows.logprobs
    if stage is None or logprobs is None:
        return None
    result: list[TokenLogprobs | None] = [None] * len(tokens)
    by_id = np.argsort(logprobs.top_ids, axis=-1)
    order = np.take_along_axis(by_id, np.argsort(-np.take_along_axis(logprobs.top, by_id, -1), -1, kind="stable"), -1)
    ids = np.take_along_axis(logprobs.top_ids, order, -1).tolist()
    values = np.take_along_axis(logprobs.top, order, -1).tolist()
    for i, (row, count) in enumerate(zip(stage.rows.tolist(), stage.counts.tolist(), strict=True)):
        top = tuple(zip(ids[i][:count], values[i][:count], strict=True))
        result[row] = TokenLogprobs(int(tokens[row]), float(logprobs.sampled[i]), top)
    return result


class SampledTokens(NamedTuple):
    """What a sampler returns, on the device.

    Args:
        tokens: [S] int32.
        logprobs: of the rows that asked; None if none did.
    """

    tokens: torch.Tensor
    logprobs: Logprobs[torch.Tensor] | None = None


class Sampler(Protocol):
    """Chooses the next token of each row.

    Tie and edge cases: among equal logits the lower token id counts as likelier; top-p and min-p leave at least the
    likeliest token; a token whose logit is −inf is never chosen while another is finite. A row's token depends on
    the row's own logits, parameters and key alone.
    """

    capturable: bool
    """Whether `sample` may be recorded in a CUDA graph when no row needs more than the random stage."""

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        """Sample without waiting for the device and without changing ``logits``.

        Args:
            logits: [S, vocab] of any floating-point dtype; computed with in float32, or float64 if given that.
            inputs: the stages this batch needs.
            history: tokens of the rows with penalties; None if there are none.
        """
        ...


class DefaultSampler:
    """Every stage in plain PyTorch, in this order:

    1. log-probabilities are of the model's own logits, before any other stage;
    2. logit bias;
    3. penalties: repetition, then frequency and presence;
    4. stop tokens are masked while the request is shorter than ``min_tokens``;
    5. tokens that a row's constraint does not allow next are masked;
    6. a greedy row takes its likeliest token now;
    7. temperature, then top-k, then top-p of what is left, then min-p;
    8. one draw from what remains.
    """

    capturable = True

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        """See `Sampler.sample`."""
        adjusted = self._adjust(logits, inputs, history)
        tokens = adjusted.argmax(-1)
        if inputs.random is not None:
            weights = self._weights(adjusted, inputs, inputs.random)
            drawn = draw(weights, inputs.random.key_low, inputs.random.key_high)
            tokens = torch.where(inputs.random.temperature == 0, tokens, drawn)
        logprobs = None if inputs.logprobs is None else take_logprobs(logits, tokens, inputs.logprobs)
        return SampledTokens(tokens.int(), logprobs)

    def _adjust(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> torch.Tensor:
        """Stages 2 to 5. A batch that is greedy and nothing else keeps the model's dtype."""
        if inputs.all_greedy and not inputs.adjusts_logits:
            return logits
        if logits.dtype != torch.float64:
            logits = logits.float()
        if inputs.bias is not None:
            logits = add_bias(logits, inputs.bias)
        if inputs.penalties is not None:
            assert history is not None, "rows with penalties need their token history"
            logits = penalise(logits, inputs.penalties, history)
        if inputs.mask is not None:
            logits = mask_tokens(logits, inputs.mask)
        if inputs.constraint is not None:
            logits = constrain(logits, inputs.constraint)
        return logits

    def _weights(self, logits: torch.Tensor, inputs: DeviceSampling, random: RandomStage[torch.Tensor]) -> torch.Tensor:
        """Stage 7, for all rows; those of a greedy row are not used. What is 0 may not be drawn."""
        temperature = random.temperature.masked_fill(random.temperature == 0, 1.0)
        weights = softmax_weights(logits, temperature)
        if inputs.top is not None:
            weights = keep_top(weights, logits, inputs.top)
        if inputs.min_p is not None:
            weights = keep_min_p(weights, inputs.min_p)
        return weights


SAMPLERS: Registry[Callable[[], Sampler]] = {
    "default": DefaultSampler,
    "triton": "minisgl.engine.fused_sampler:FusedSampler",
}
