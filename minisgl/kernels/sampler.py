"""The sampler that draws with the kernel of `minisgl.kernels.sampling`."""

from __future__ import annotations

import torch

from minisgl.engine.logprobs import take_logprobs
from minisgl.engine.sampler import DefaultSampler, SampledTokens
from minisgl.engine.sampling_stages import SamplingInputs, TokenHistory
from minisgl.kernels.launch import check_device
from minisgl.kernels.sampling import sample_tokens


class FusedSampler(DefaultSampler):
    """The stages of `DefaultSampler`, with the last two, temperature and draw, as one pass over the logits.

    A batch that needs nothing else, greedy or random, never leaves the model's dtype. The other stages are those of
    the default sampler; what they remove is at −inf when the kernel draws.

    The same seed draws the same token as with the default sampler, unless the first two arrivals of the race lie
    within rounding error of each other.

    Raises:
        ConfigError: there is no CUDA device, and Triton does not interpret.
    """

    def __init__(self) -> None:
        check_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def sample(self, logits: torch.Tensor, inputs: SamplingInputs, history: TokenHistory | None) -> SampledTokens:
        """See `minisgl.engine.Sampler.sample`."""
        adjusted = logits
        if any(stage is not None for stage in (inputs.bias, inputs.penalties, inputs.mask, inputs.top, inputs.min_p)):
            adjusted = self._adjust(logits, inputs, history)
        if inputs.random is not None and (inputs.top is not None or inputs.min_p is not None):
            weights = self._weights(adjusted, inputs, inputs.random)
            adjusted = adjusted.masked_fill(weights == 0, float("-inf"))
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        sample_tokens(adjusted, inputs.random, tokens)
        logprobs = None if inputs.logprobs is None else take_logprobs(logits, tokens.long(), inputs.logprobs)
        return SampledTokens(tokens, logprobs)
