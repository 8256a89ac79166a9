"""Layers whose small operators are one function each, for torch.compile: the compiler's answer to our own kernels.

Only pure functions on tensors are compiled. Matrix products, attention and collectives stay as they are, so they break
no graph, and all layers of a model share the compiled code. A function is compiled at its first call, for any number
of tokens at the second number, and for a single token; the warm-up of each CUDA graph makes these calls before its
capture. In half precision, the compiler does not round between two operators that it joins.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from minisgl.layers.attention import Attention
from minisgl.layers.mlp import GatedMLP, silu_and_mul
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotation, rotate
from minisgl.layers.sharding import take_over


@torch.compile
def compiled_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of ``x``, [..., size]."""
    return F.rms_norm(x, weight.shape, weight, eps)


@torch.compile
def compiled_add_and_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm of ``x + residual``, and the sum; all [T, size]."""
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


@torch.compile
def compiled_norm_and_rotate(
    q: torch.Tensor,
    k: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    rotation: Rotation,
) -> torch.Tensor:
    """Queries and keys, [T, heads, head_dim] each, side by side, normalised if there are weights, and rotated."""
    if q_weight is not None and k_weight is not None:
        q, k = F.rms_norm(q, q_weight.shape, q_weight, eps), F.rms_norm(k, k_weight.shape, k_weight, eps)
    return rotate(torch.cat([q, k], dim=1), rotation)


compiled_silu_and_mul = torch.compile(silu_and_mul)


class CompiledRMSNorm(RMSNorm):
    """The norm as one function, and residual addition and norm as another."""

    def __init__(self, norm: RMSNorm) -> None:
        take_over(self, norm)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return compiled_norm(x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if residual is None:
            return self(x), x
        return compiled_add_and_norm(x, residual, self.weight, self.eps)


class CompiledGatedMLP(GatedMLP):
    """The MLP with SiLU and product as one function."""

    def __init__(self, mlp: GatedMLP) -> None:
        take_over(self, mlp)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(compiled_silu_and_mul(self.gate_up_proj(x)))
        return out


class CompiledAttention(Attention):
    """Attention with QK-norm and rotation as one function."""

    def __init__(self, attention: Attention) -> None:
        take_over(self, attention)

    def normalize_and_rotate(self, qk: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        q, k = qk[:, : self.spec.num_heads], qk[:, self.spec.num_heads :]
        q_norm, k_norm = self.q_norm, self.k_norm
        if q_norm is None or k_norm is None:
            return compiled_norm_and_rotate(q, k, None, None, 0.0, rotation)
        return compiled_norm_and_rotate(q, k, q_norm.weight, k_norm.weight, q_norm.eps, rotation)
