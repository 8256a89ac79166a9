"""Root-mean-square normalisation, which keeps the size of hidden states in bounds from layer to layer.

LayerNorm also subtracts the mean; without it there is one pass over the data less (Zhang and Sennrich 2019)::

    y = x / sqrt(mean(x²) + eps) × weight

The fused twins are `minisgl.layers.fused.FusedRMSNorm` and, with an all-reduce before it, `FusedAllReduceRMSNorm`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.sharding import empty_parameter


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension. Half-precision inputs are normalised in float32.

    Args:
        size: elements of a hidden state.
        eps: added to the mean square, so that a state of zeros can be divided.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = empty_parameter(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size] → [..., size], same dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Add ``x``, [T, size], to the residual stream; return the normalised sum and the sum.

        ``residual`` is None in the first layer, where the stream begins. The two steps are one method because one
        kernel can do both: the sum is then written and read once.
        """
        total = x if residual is None else x + residual
        return self(total), total
