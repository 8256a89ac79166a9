"""Root-mean-square normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.sharding import empty_parameter


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x²) + eps) × weight`` over the last dimension (Zhang and Sennrich 2019).

    Half-precision inputs are normalised in float32.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], same dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x``, [T, size], to the residual stream, and return the normalised sum and the sum.

        ``residual`` is None at the stream's source. One kernel can do both steps, so they are one method.
        """
        total = x if residual is None else x + residual
        return self(total), total
