"""From logits to tokens: the protocol, its table, and the sampler that the engine uses unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from minisgl.core.registry import Table
from minisgl.engine.logits_processors import (
    add_bias,
    constrain,
    keep_min_p,
    keep_top,
    mask_tokens,
    penalise,
    softmax_weights,
)
from minisgl.engine.logprobs import Logprobs, take_logprobs
from minisgl.engine.random import draw
from minisgl.engine.sampling_stages import DeviceSampling, RandomStage, TokenHistory


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


SAMPLERS: Table[Callable[[], Sampler]] = {
    "default": DefaultSampler,
    "triton": "minisgl.engine.fused_sampler:FusedSampler",
}
