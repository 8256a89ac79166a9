"""The gated MLP."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.core import SINGLE_RANK, Communicator
from minisgl.layers.activation import silu_and_mul
from minisgl.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from minisgl.layers.shares import divide


class GatedMLP(nn.Module):
    """``down(silu(gate(x)) × up(x))`` with gate and up as one product.

    Args:
        hidden_size: width of input and output.
        intermediate_size: width between, over all ranks.
        bias: whether the three projections have biases.
        communicator: joins the ranks that share the width between.

    Raises:
        ConfigError: the ranks cannot share it equally.
    """

    def __init__(
        self, hidden_size: int, intermediate_size: int, bias: bool = False, communicator: Communicator = SINGLE_RANK
    ) -> None:
        super().__init__()
        shard = divide("intermediate_size", intermediate_size, communicator)
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, {"gate_proj": shard, "up_proj": shard}, bias)
        self.down_proj = RowParallelLinear(shard, hidden_size, bias, communicator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out
