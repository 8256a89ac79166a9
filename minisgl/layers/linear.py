"""Linear layers: single, merged, and divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minisgl.core import SINGLE_RANK, Communicator
from minisgl.layers.blocked import linear
from minisgl.layers.shares import Shard, whole
from minisgl.layers.weights import ShardSpec, WeightPart, weight


class Linear(nn.Module):
    """``y = x Wᵀ + b``.

    Args:
        in_features, out_features: widths; the weight is [out_features, in_features], as in checkpoints.
        bias: whether there is a b.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = weight(out_features, in_features)
        self.bias = weight(out_features) if bias else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] → [T, out_features]."""
        return linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(Linear):
    """Several projections of the same input as one matrix product: one large product keeps the machine busier than
    several small ones.

    Where ranks share the model, each has some rows of every projection's weight, and computes some of its outputs: the
    projections are column-parallel, named after the columns of Wᵀ (Megatron-LM, Shoeybi et al. 2019).

    Args:
        in_features: width of the input.
        parts: checkpoint name → rows of each projection, or this rank's shard of them, in the order in which the
            outputs are laid out.
        bias: whether all of them have a bias.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int | Shard], bias: bool = False) -> None:
        shards = {name: whole(rows) if isinstance(rows, int) else rows for name, rows in parts.items()}
        super().__init__(in_features, sum(shard.size for shard in shards.values()), bias)
        self.parts = shards

    def weight_parts(self) -> list[WeightPart]:
        parameters = ["weight"] if self.bias is None else ["weight", "bias"]
        mapping: list[WeightPart] = []
        start = 0
        for name, shard in self.parts.items():
            region, spec = (slice(start, start + shard.size),), ShardSpec(0, shard)
            mapping += [WeightPart(f"{name}.{parameter}", parameter, region, spec) for parameter in parameters]
            start += shard.size
        return mapping


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections of attention as one matrix product.

    Args:
        hidden_size: width of the input.
        heads, kv_heads: this rank's shards of the query and of the KV heads.
        head_dim: width of a head.
        bias: whether all three have a bias.
    """

    def __init__(self, hidden_size: int, heads: Shard, kv_heads: Shard, head_dim: int, bias: bool = False) -> None:
        q, kv = heads.of_width(head_dim), kv_heads.of_width(head_dim)
        super().__init__(hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias)


class RowParallelLinear(Linear):
    """A linear layer whose input is divided among ranks, as `MergedColumnParallelLinear` leaves it: each
    multiplies what it has by the matching columns of W, and the sum over the ranks is the output.

    Args:
        in_features: this rank's shard of the input.
        out_features: width of the output.
        bias: whether there is a b. Every rank holds it, and the first one adds it.
        communicator: joins the ranks. `SINGLE_RANK` leaves this rank's part of the sum to `FusedAllReduceRMSNorm`.
    """

    def __init__(
        self, in_features: Shard, out_features: int, bias: bool = False, communicator: Communicator = SINGLE_RANK
    ) -> None:
        super().__init__(in_features.size, out_features, bias)
        self.in_shard = in_features
        self.is_first = communicator.rank == 0
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_shard.size] → [T, out_features]."""
        partial = linear(x, self.weight, self.bias if self.is_first else None)
        return self.communicator.all_reduce(partial)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(1, self.in_shard)}
