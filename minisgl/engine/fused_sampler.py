"""The sampler that draws with the kernels of `minisgl.kernels.top_p` and `minisgl.kernels.sampling`."""

from __future__ import annotations

import torch

from minisgl.engine.sampler import DefaultSampler, SampledTokens, take_logprobs
from minisgl.engine.sampling import DeviceSampling, TokenHistory
from minisgl.kernels.launch import check_device
from minisgl.kernels.sampling import sample_tokens
from minisgl.kernels.top_p import find_thresholds


class FusedSampler(DefaultSampler):
    """The stages of `DefaultSampler`, with temperature and draw as one pass over the logits.

    Top-k, top-p and min-p are a threshold that this pass compares with, found in two launches and without sorting. A
    batch that needs nothing else never leaves the model's dtype. Biases, penalties, masks and constraints are the
    default sampler's.

    The same seed draws the same token as with the default sampler, unless the first two arrivals of the race lie
    within rounding error of each other, or a token within that of where top-p or min-p end.

    Raises:
        ConfigError: there is no CUDA device, and Triton does not interpret.
    """

    def __init__(self) -> None:
        check_device(torch.device("cuda" if torch.cuda.is_available() else "cpu"))

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        adjusted = self._adjust(logits, inputs, history) if inputs.adjusts_logits else logits
        thresholds = None
        if inputs.random is not None and (inputs.top is not None or inputs.min_p is not None):
            top = None if inputs.top is None else (inputs.top.rows, inputs.top.top_k, inputs.top.top_p)
            thresholds = find_thresholds(adjusted, inputs.random.temperature, top, inputs.min_p)
        tokens = torch.empty(len(logits), dtype=torch.int32, device=logits.device)
        sample_tokens(adjusted, inputs.random, tokens, thresholds)
        logprobs = None if inputs.logprobs is None else take_logprobs(logits, tokens.long(), inputs.logprobs)
        return SampledTokens(tokens, logprobs)
