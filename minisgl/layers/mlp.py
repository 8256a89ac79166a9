"""The gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.layers.activation import silu_and_mul
from minisgl.layers.linear import Linear, PackedLinear


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) × up(x))`` with gate and up as one product.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between, on this rank.
        bias: whether the three projections have biases.
    """

    def __init__(self, hidden_size: int, intermediate_size: int, bias: bool = False) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = PackedLinear(hidden_size, parts, bias)
        self.down_proj = Linear(intermediate_size, hidden_size, bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out
