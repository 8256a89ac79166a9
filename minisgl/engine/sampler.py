"""From logits to tokens: a sampler in plain PyTorch, one with fused kernels, and the log-probabilities of tokens."""

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
from minisgl.engine.random import draw, exponentials, token_hash
from minisgl.engine.sampling import A, DeviceSampling, HostSampling, LogprobStage, RandomStage, TokenHistory
from minisgl.errors import ConfigError
from minisgl.kernels import has_triton
from minisgl.registry import Registry
from minisgl.request import Int32Array, TokenLogprobs


class Sampler(Protocol):
    """Chooses the next token of each row, from that row's logits, parameters and key alone.

    Among equal logits the lower token id counts as likelier. Top-p and min-p keep at least the likeliest token. A token
    whose logit is −inf is never chosen while another is finite.
    """

    capturable: bool  # whether a CUDA graph can hold `sample` when no row needs more than the random stage

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        """Sample without waiting for the device or changing ``logits``, [S, vocab] of any floating-point dtype.

        We compute in float32, or float64 if given that. ``history`` is None if no row has penalties.
        """
        ...


class SampledTokens(NamedTuple):
    """What a sampler returns, on the device: [S] int32 tokens, and log-probabilities if any row asked."""

    tokens: torch.Tensor
    logprobs: Logprobs[torch.Tensor] | None = None


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


class FusedSampler(DefaultSampler):
    """Temperature and draw in one pass over the logits, with Triton; stages 2 to 5 are the default sampler's.

    Top-k, top-p and min-p become a threshold for this pass, found in two launches without sorting. A seed draws the
    same token as with the default sampler, except within rounding error of a tie or of where top-p or min-p end.
    """

    def __init__(self) -> None:
        if not has_triton():
            raise ConfigError("sampler: 'triton' needs Triton, which is not installed here; use 'default'")
        from minisgl.kernels.launch import check_device
        from minisgl.kernels.sampling import sample_tokens
        from minisgl.kernels.top_p import find_thresholds

        check_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
        self._sample_tokens, self._find_thresholds = sample_tokens, find_thresholds

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        adjusted = self._adjust(logits, inputs, history) if inputs.adjusts_logits else logits
        thresholds = None
        if inputs.random is not None and (inputs.top is not None or inputs.min_p is not None):
            top = None if inputs.top is None else (inputs.top.rows, inputs.top.top_k, inputs.top.top_p)
            thresholds = self._find_thresholds(adjusted, inputs.random.temperature, top, inputs.min_p)
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        self._sample_tokens(adjusted, inputs.random, tokens, thresholds)
        logprobs = None if inputs.logprobs is None else take_logprobs(logits, tokens.long(), inputs.logprobs)
        return SampledTokens(tokens, logprobs)


class CompiledSampler(DefaultSampler):
    """The default sampler with temperature and draw as one function of torch.compile; other stages run as they are."""

    def __init__(self) -> None:
        self._compiled_race = torch.compile(race)

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        if inputs.random is None or inputs.top is not None or inputs.min_p is not None:
            return super().sample(logits, inputs, history)
        adjusted = self._adjust(logits, inputs, history) if inputs.adjusts_logits else logits
        # For a CPU, PyTorch 2.13 compiles it to code that leaves its memory where rows have certain lengths.
        run = self._compiled_race if logits.is_cuda else race
        tokens = run(adjusted, *inputs.random).argmax(-1)
        logprobs = None if inputs.logprobs is None else take_logprobs(logits, tokens, inputs.logprobs)
        return SampledTokens(tokens.int(), logprobs)


def race(
    logits: torch.Tensor, temperature: torch.Tensor, key_low: torch.Tensor, key_high: torch.Tensor
) -> torch.Tensor:
    """How early each token arrives, [S, vocab]: the largest number of a row is the token that `draw` would choose with
    its temperature alone, or the likeliest one if that is 0."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    greedy = (temperature == 0).unsqueeze(-1)
    weights = softmax_weights(wide, temperature.masked_fill(temperature == 0, 1.0))
    return torch.where(greedy, wide, weights / exponentials(token_hash(key_low, key_high, logits.shape[-1])))


SAMPLERS: Registry[Callable[[], Sampler]] = {
    "default": DefaultSampler,
    "triton": FusedSampler,
    "compile": CompiledSampler,
}


class Logprobs(NamedTuple, Generic[A]):
    """Log-probabilities of the L rows that asked, in the order of ``LogprobStage.rows``; K is its ``max_count``."""

    sampled: A  # [L] of the sampled token
    top: A  # [L, K] of the likeliest tokens, best first
    top_ids: A  # [L, K] int32, their ids


def take_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, stage: LogprobStage[torch.Tensor]
) -> Logprobs[torch.Tensor]:
    """Log-softmax of raw [S, vocab] logits at the sampled tokens, [S] int64, and the likeliest, for rows that asked."""
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
    """Turn log-probabilities on the host into those of S rows, None for rows that did not ask; None if none did."""
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
