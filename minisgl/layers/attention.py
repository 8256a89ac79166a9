"""The attention layer: projections and rotary embedding, around the attention backend of the forward context."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from minisgl.context import AttentionSpec, get_forward_context
from minisgl.layers.linear import QKVParallelLinear, RowParallelLinear
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantization import QuantizedWeight, reorder_rows
from minisgl.layers.quantizers import RoundedRows
from minisgl.layers.rotary import Rotation, rotate
from minisgl.layers.sharding import SINGLE_RANK, Communicator, ShardSpec, divide, divide_kv_heads, empty_parameter


class Attention(nn.Module):
    """Causal self-attention. The ranks share its heads: ``spec`` has those of all ranks, ``self.spec`` this rank's.

    With ``qk_norm_eps``, each query and key head is normalised (QK-norm, Henry et al. 2020).
    """

    def __init__(
        self,
        hidden_size: int,
        spec: AttentionSpec,
        qkv_bias: bool = False,
        o_bias: bool = False,
        qk_norm_eps: float | None = None,
        communicator: Communicator = SINGLE_RANK,
        packed: bool = False,
        sinks: bool = False,
    ) -> None:
        super().__init__()
        heads = divide("num_attention_heads", spec.num_heads, communicator)
        kv_heads = divide_kv_heads(spec.num_kv_heads, communicator)
        self.spec = replace(spec, num_heads=heads.size, num_kv_heads=kv_heads.size)
        self.qkv_proj = QKVParallelLinear(hidden_size, heads, kv_heads, spec.head_dim, qkv_bias, packed)
        self.o_proj = RowParallelLinear(heads.times(spec.head_dim), hidden_size, o_bias, communicator)
        self.q_norm = None if qk_norm_eps is None else RMSNorm(spec.head_dim, qk_norm_eps)
        self.k_norm = None if qk_norm_eps is None else RMSNorm(spec.head_dim, qk_norm_eps)
        self._heads = heads
        self.sinks = empty_parameter(heads.size) if sinks else None

    def forward(self, x: torch.Tensor | RoundedRows, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        spec = self.bound_spec()
        qkv = self.qkv_proj(x).view(len(x), -1, spec.head_dim)
        # Queries and keys lie side by side, so they are normalised and rotated together.
        first_v = spec.num_heads + spec.num_kv_heads
        qk, v = self.normalize_and_rotate(qkv[:, :first_v], rotation), qkv[:, first_v:]
        q, k = qk[:, : spec.num_heads], qk[:, spec.num_heads :]
        attended = get_forward_context().attention.forward(q, k, v, spec)
        out: torch.Tensor = self.o_proj(attended.flatten(1))
        return out

    def normalize_and_rotate(self, qk: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Normalise, where the model does, and rotate [T, num_heads + num_kv_heads, head_dim]."""
        return rotate(self.normalize(qk), rotation)

    def normalize(self, qk: torch.Tensor) -> torch.Tensor:
        """Apply QK-norm, if the model has it, to [T, num_heads + num_kv_heads, head_dim]."""
        if self.q_norm is None or self.k_norm is None:
            return qk
        q, k = qk[:, : self.spec.num_heads], qk[:, self.spec.num_heads :]
        return torch.cat([self.q_norm(q), self.k_norm(k)], dim=1)

    def bound_spec(self) -> AttentionSpec:
        """`spec` with the sinks, which have their memory only since the loader has filled them."""
        if self.spec.sinks is not self.sinks:
            self.spec = replace(self.spec, sinks=self.sinks)
        return self.spec

    def shard_specs(self) -> dict[str, ShardSpec]:
        return {} if self.sinks is None else {"sinks": ShardSpec(0, self._heads)}

    def reorder_heads(self, order: list[int]) -> None:
        """Put element ``order[i]`` of each query and key head in place i; see `RopeSettings.head_order`."""
        head_dim, qkv = self.spec.head_dim, self.qkv_proj
        rotated = self.spec.num_heads + self.spec.num_kv_heads
        rows = torch.arange(rotated).repeat_interleave(head_dim) * head_dim + torch.tensor(order).repeat(rotated)
        if isinstance(qkv.weight, QuantizedWeight):
            qkv.weight.reorder_rows(rows, within=head_dim)
        else:
            reorder_rows(qkv.weight, rows)
        if qkv.bias is not None:
            reorder_rows(qkv.bias, rows)
        for norm in (self.q_norm, self.k_norm):
            if norm is not None:
                reorder_rows(norm.weight, rows[: len(norm.weight)])
