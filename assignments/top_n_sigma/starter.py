"""Assignment top_n_sigma: the starter. README.md beside this file says what to do."""

from __future__ import annotations

import math

import torch

from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import DeviceSampling, TokenHistory


class TopNSigma:
    """Draws from the tokens whose logits are within n standard deviations of the largest.

    Args:
        n: how many; infinite keeps all tokens.
    """

    capturable = True

    def __init__(self, n: float = math.inf) -> None:
        self.n = n

    def sample(self, logits: torch.Tensor, inputs: DeviceSampling, history: TokenHistory | None) -> SampledTokens:
        """See `minisgl.engine.sampler.Sampler`."""
        raise NotImplementedError("Assignment top_n_sigma: TopNSigma.sample")
