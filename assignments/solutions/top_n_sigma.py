"""Reference solution of ``top_n_sigma``."""

from __future__ import annotations

import math

import torch

from minisgl.engine.sampler import DefaultSampler
from minisgl.engine.sampling import DeviceSampling, RandomStage


class TopNSigma(DefaultSampler):
    """The default sampler with one stage more, before the temperature: top-nσ (Tang et al. 2024).

    Args:
        n: how many standard deviations below the largest logit a token may be; infinite keeps all.
    """

    def __init__(self, n: float = math.inf) -> None:
        self.n = n

    def _weights(self, logits: torch.Tensor, inputs: DeviceSampling, random: RandomStage[torch.Tensor]) -> torch.Tensor:
        """What the new stage takes away is at −inf for all stages after it."""
        if math.isfinite(self.n):  # ∞ × 0 is no distance, where all logits are equal
            logits = keep_top_n_sigma(logits, self.n)
        return super()._weights(logits, inputs, random)


def keep_top_n_sigma(logits: torch.Tensor, n: float) -> torch.Tensor:
    """Set logits further than ``n`` standard deviations below the row's largest to −inf.

    Tokens at −inf are no part of the distribution, so they are none of its standard deviation either.

    Args:
        logits: [S, vocab] float32 or float64.
        n: at least 0.
    """
    exists = logits.isfinite()
    count = exists.sum(-1, keepdim=True)
    mean = logits.masked_fill(~exists, 0.0).sum(-1, keepdim=True) / count
    sigma = (logits - mean).masked_fill(~exists, 0.0).square().sum(-1, keepdim=True).div(count).sqrt()
    return logits.masked_fill(logits < logits.amax(-1, keepdim=True) - n * sigma, float("-inf"))
