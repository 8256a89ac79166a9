"""Layers that compute with the kernels of this chapter. Each is made from the plain layer that it replaces, whose
parameters it shares under the same names."""

from __future__ import annotations

import torch
from torch import nn

from minisgl.core import get_forward_context
from minisgl.kernels.activation import silu_and_mul
from minisgl.kernels.experts import sum_of_experts
from minisgl.kernels.norm import add_and_norm
from minisgl.kernels.rope import rotate_and_store
from minisgl.kvcache.paged_attention import PagedAttention
from minisgl.layers import Attention, Experts, GatedMLP, RMSNorm, Rotary, Rotation


class FusedRMSNorm(RMSNorm):
    """Residual addition and norm as one kernel.

    Args:
        norm: to replace.
    """

    def __init__(self, norm: RMSNorm) -> None:
        nn.Module.__init__(self)
        self.weight, self.eps = norm.weight, norm.eps

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RMSNorm.add_and_norm`."""
        return add_and_norm(x, residual, self.weight, self.eps)


class FusedGatedMLP(GatedMLP):
    """SiLU·mul as one kernel.

    Args:
        mlp: to replace.
    """

    def __init__(self, mlp: GatedMLP) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = mlp.gate_up_proj, mlp.down_proj

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        out: torch.Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return out


class FusedExperts(Experts):
    """All experts as two grouped products, without the host in between.

    Args:
        experts: to replace.
    """

    capturable = True

    def __init__(self, experts: Experts) -> None:
        nn.Module.__init__(self)
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj

    def forward(self, x: torch.Tensor, experts: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """See `Experts.forward`."""
        return sum_of_experts(x, self.gate_up_proj, self.down_proj, experts, weights)


class FusedAttention(Attention):
    """QK-norm, rotary embedding and KV store as one kernel, then attention over what is stored.

    Looks up each token's rotation itself, in the table, and does not read the one that it is handed. Without a KV cache
    (in the memory warm-up) it is the plain layer.

    Args:
        attention: to replace.
        rotary: of the model.
    """

    def __init__(self, attention: Attention, rotary: Rotary) -> None:
        nn.Module.__init__(self)
        self.spec = attention.spec
        self.qkv_proj, self.o_proj = attention.qkv_proj, attention.o_proj
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self.rotary = rotary

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """[T, hidden_size] → [T, hidden_size]."""
        context = get_forward_context()
        inputs, backend, spec = context.inputs, context.attention, self.spec
        if not isinstance(backend, PagedAttention):
            return super().forward(x, self.rotary(inputs.positions, x.dtype))
        q = rotate_and_store(
            self.qkv_proj(x),
            self.rotary.table,
            inputs.positions,
            inputs.out_locs,
            backend.kv_cache.k[spec.layer_id],
            backend.kv_cache.v[spec.layer_id],
            self.q_norm,
            self.k_norm,
        )
        out: torch.Tensor = self.o_proj(backend.attend(q, spec).flatten(1))
        return out


class NoRotary(Rotary):
    """The rotary module of a model all of whose attention layers look their rotations up themselves."""

    def __init__(self) -> None:
        nn.Module.__init__(self)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Nothing. A layer that reads it all the same fails, because no head has width 0."""
        nothing = torch.empty((0, 1, 0), dtype=dtype, device=positions.device)
        return Rotation(nothing, nothing)
