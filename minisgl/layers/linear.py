"""Linear layers: the plain one, and the column-parallel and row-parallel ones of Megatron-LM (Shoeybi et al. 2019)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.quantizers import RoundedRows
from minisgl.layers.sharding import SINGLE_RANK, Communicator, Shard, ShardSpec, WeightPart, empty_parameter

Weight = torch.Tensor | QuantizedWeight
"""What a linear layer multiplies with: the loader puts a quantised weight in a parameter's place."""


class Linear(nn.Module):
    """``y = x Wᵀ + b``. As in checkpoints, the weight is [out_features, in_features]."""

    def __init__(self, in_features: int, out_features: int, bias: bool = False) -> None:
        super().__init__()
        self.weight: Weight = empty_parameter(out_features, in_features)
        self.bias = empty_parameter(out_features) if bias else None

    def forward(self, x: torch.Tensor | RoundedRows) -> torch.Tensor:
        """[T, in_features] → [T, out_features]."""
        return linear(x, self.weight, self.bias)


class MergedColumnParallelLinear(Linear):
    """Several projections of one input as one matrix product, sharded by outputs, the columns of Wᵀ.

    ``parts``: checkpoint name → rows of each projection, or this rank's shard of them, in the order of the outputs.
    With ``packed``, checkpoints hold them as one tensor too, in that order and under this layer's own name.
    """

    def __init__(
        self, in_features: int, parts: Mapping[str, int | Shard], bias: bool = False, packed: bool = False
    ) -> None:
        shards = {name: Shard.whole(rows) if isinstance(rows, int) else rows for name, rows in parts.items()}
        super().__init__(in_features, sum(shard.size for shard in shards.values()), bias)
        self.parts = shards
        self.packed = packed

    def shard_specs(self) -> dict[str, ShardSpec]:
        first, *behind = self.parts.values()
        spec = ShardSpec(0, first, tuple(behind))
        return {"weight": spec, "bias": spec} if self.packed else {}

    def weight_parts(self) -> list[WeightPart]:
        if self.packed:
            return []
        parameters = ["weight"] if self.bias is None else ["weight", "bias"]
        mapping: list[WeightPart] = []
        start = 0
        for name, shard in self.parts.items():
            region, spec = (slice(start, start + shard.size),), ShardSpec(0, shard)
            mapping += [WeightPart(f"{name}.{parameter}", parameter, region, spec) for parameter in parameters]
            start += shard.size
        return mapping


class QKVParallelLinear(MergedColumnParallelLinear):
    """The query, key and value projections of attention as one matrix product, for a rank's shards of the heads."""

    def __init__(
        self,
        hidden_size: int,
        heads: Shard,
        kv_heads: Shard,
        head_dim: int,
        bias: bool = False,
        packed: bool = False,
    ) -> None:
        q, kv = heads.times(head_dim), kv_heads.times(head_dim)
        super().__init__(hidden_size, {"q_proj": q, "k_proj": kv, "v_proj": kv}, bias, packed)


class RowParallelLinear(Linear):
    """A linear layer over a sharded input: each rank has its columns of W, and an all-reduce sums the results."""

    def __init__(
        self, in_shard: Shard, out_features: int, bias: bool = False, communicator: Communicator = SINGLE_RANK
    ) -> None:
        super().__init__(in_shard.size, out_features, bias)
        self.in_shard = in_shard
        self.communicator = communicator  # SINGLE_RANK if the norm behind this layer does the all-reduce
        self.adds_bias = communicator.rank == 0  # every rank holds the bias, one adds it

    def forward(self, x: torch.Tensor | RoundedRows) -> torch.Tensor:
        """[T, in_shard.size] → [T, out_features]."""
        partial = linear(x, self.weight, self.bias if self.adds_bias else None)
        return self.communicator.all_reduce(partial)

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {"weight": ShardSpec(1, self.in_shard)}


def linear(x: torch.Tensor | RoundedRows, weight: Weight, bias: torch.Tensor | None) -> torch.Tensor:
    """``x Wᵀ + b`` for a row-major weight, [out_features, in_features], a prepacked or a quantised one.

    Rounded rows are only for weights that take them (`takes_rounded_rows`).
    """
    if isinstance(x, RoundedRows):
        assert isinstance(weight, QuantizedWeight), "such weights alone take rounded rows"
        return x.multiply(weight.tensors, bias, weight.dtype)
    if isinstance(weight, QuantizedWeight):
        return weight.linear(x, bias)
    if weight.is_mkldnn:
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return out
    return F.linear(x, weight, bias)


def prepack_weight(weight: Weight) -> Weight:
    """Copy a float32 CPU weight into oneDNN's faster blocked layout (undo: ``to_dense()``); others stay unchanged.

    A quantised weight has a faster layout if its quantiser knows one.
    """
    if isinstance(weight, QuantizedWeight):
        return weight.prepack()
    if weight.device.type != "cpu" or weight.dtype != torch.float32 or not torch.backends.mkldnn.is_available():
        return weight
    return nn.Parameter(torch.ops.mkldnn._reorder_linear_weight(weight), requires_grad=False)
