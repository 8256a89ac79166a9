"""Root-mean-square normalisation, which keeps the size of hidden states in bounds from layer to layer.

LayerNorm subtracts the mean and divides by the standard deviation. RMSNorm only divides by the root of the mean square,
which is one pass over the data less and trains as well (Zhang and Sennrich 2019):

    y = x / sqrt(mean(x²) + eps) × weight

The fused twin is `minisgl.layers.fused.FusedRMSNorm`; with tensor parallelism its sum is an all-reduce, which
`FusedAllReduceRMSNorm` does in the same kernel.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.sharding import empty_parameter


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension. Half-precision inputs are normalised in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], same dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x``, [T, size], to the residual stream, and return the normalised sum and the sum.

        ``residual`` is None in the first layer, where the stream begins. The two steps are one method because one
        kernel can do both: the sum is then written and read once.
        """
        total = x if residual is None else x + residual
        return self(total), total
