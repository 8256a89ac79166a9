"""Layers that compute with fused kernels. Each replaces a plain layer, and keeps its parameters and their names."""

from __future__ import annotations

import torch

from minisgl.context import PagedAttentionBackend, get_forward_context
from minisgl.kernels.experts import fused_experts
from minisgl.kernels.norm import add_and_norm, silu_and_mul
from minisgl.kernels.rope import rotate_and_store
from minisgl.kernels.rounding import add_norm_and_round, silu_mul_and_round
from minisgl.layers.attention import Attention
from minisgl.layers.mlp import Experts, GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantizers import WEIGHT_ONLY_TOKENS, RoundedRows, takes_rounded_rows
from minisgl.layers.rotary import Rotary, Rotation
from minisgl.layers.sharding import Communicator, take_over


class FusedRMSNorm(RMSNorm):
    """Residual addition and norm as one kernel.

    If ``rounds``, what is normalised is read by a product alone, which takes `RoundedRows`.
    """

    def __init__(self, norm: RMSNorm) -> None:
        take_over(self, norm)
        self.rounds = False

    def add_and_norm(  # type: ignore[override]  # the product behind it takes rounded rows
        self, x: torch.Tensor, residual: torch.Tensor | None
    ) -> tuple[torch.Tensor | RoundedRows, torch.Tensor]:
        if self.rounds and len(x) > WEIGHT_ONLY_TOKENS:
            numbers, scale, total = add_norm_and_round(x, residual, self.weight, self.eps)
            return RoundedRows(numbers, scale), total
        return add_and_norm(x, residual, self.weight, self.eps)


class FusedAllReduceRMSNorm(RMSNorm):
    """All-reduce, residual addition and norm: one kernel if the communicator has it, else two.

    For all norms of a decoder or none, because the residual stream may be spread over the ranks between two of them.
    The row-parallel layer before it must not all-reduce.
    """

    def __init__(self, norm: RMSNorm, communicator: Communicator) -> None:
        take_over(self, norm)
        self._communicator = communicator

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """As `RMSNorm.add_and_norm`, but ``x`` is this rank's part of the sum."""
        if self._communicator.fuses_norm(x):
            return self._communicator.all_reduce_and_norm(x, residual, self.weight, self.eps)
        return add_and_norm(self._communicator.all_reduce(x), residual, self.weight, self.eps)


class FusedGatedMLP(GatedMLP):
    """The MLP with SiLU and product as one kernel, which also rounds if the last product has rounded inputs."""

    def __init__(self, mlp: GatedMLP) -> None:
        take_over(self, mlp)

    def forward(self, x: torch.Tensor | RoundedRows) -> torch.Tensor:
        gate_up = self.gate_up_proj(x)
        hidden: torch.Tensor | RoundedRows
        if takes_rounded_rows(self.down_proj.weight) and len(x) > WEIGHT_ONLY_TOKENS:
            hidden = RoundedRows(*silu_mul_and_round(gate_up))
        else:
            hidden = silu_and_mul(gate_up)
        out: torch.Tensor = self.down_proj(hidden)
        return out


class FusedExperts(Experts):
    """All experts as two grouped matrix products, without a synchronisation between them."""

    capturable = True

    def __init__(self, experts: Experts) -> None:
        take_over(self, experts)

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return fused_experts(x, self.gate_up_proj, self.down_proj, experts, weights)


class FusedAttention(Attention):
    """QK-norm, rotary embedding and KV store as one kernel that reads the rotary table itself, then attention."""

    def __init__(self, attention: Attention, rotary: Rotary) -> None:
        take_over(self, attention)
        self.rotary = rotary

    def forward(self, x: torch.Tensor | RoundedRows, rotation: Rotation) -> torch.Tensor:
        context = get_forward_context()
        inputs, backend, spec = context.inputs, context.attention, self.bound_spec()
        if not isinstance(backend, PagedAttentionBackend):  # without a KV cache there is nowhere to store
            return super().forward(x, self.rotary(inputs.positions, self.qkv_proj.weight.dtype))
        q = rotate_and_store(
            self.qkv_proj(x),
            self.rotary.table,
            inputs.positions,
            inputs.locs_of(spec.sliding_window),
            *backend.kv_cache.layer(spec.layer_id),
            q_norm=None if self.q_norm is None else self.q_norm.weight,
            k_norm=None if self.k_norm is None else self.k_norm.weight,
            eps=0.0 if self.q_norm is None else self.q_norm.eps,
        )
        out: torch.Tensor = self.o_proj(backend.attend(q, spec).flatten(1))
        return out


class NoRotary(Rotary):
    """The rotary module of a decoder whose attention layers all read the table themselves: it computes nothing."""

    def __init__(self, rotary: Rotary) -> None:
        take_over(self, rotary)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Return an empty rotation. A layer that uses it fails, because no head has width 0."""
        nothing = torch.empty((0, 1, 0), dtype=dtype, device=positions.device)
        return Rotation(nothing, nothing)
