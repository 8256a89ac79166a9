"""Linear layers: plain, packed and row-parallel."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.sharding import SINGLE_RANK, Communicator, Shard, ShardSpec, WeightPart, weight, whole


def blocked(weight: nn.Parameter) -> nn.Parameter:
    """A copy of ``weight`` ([out_features, in_features]) in oneDNN's layout; ``to_dense()`` of it is the weight again.

    Only float32 on the CPU has one; any other weight is returned as it is.
    """
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight), requires_grad=False)


def linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """``x Wᵀ + b`` for a weight of either layout.

    Args:
        x: [T, in_features].
        weight: [out_features, in_features], row-major or `blocked`.
        bias: [out_features] or None.

    Returns:
        [T, out_features].
    """
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


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
