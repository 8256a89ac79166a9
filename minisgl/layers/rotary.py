"""Rotary position embedding: one table for all layers, read once a step."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import nn

from minisgl.core.registry import resolve
from minisgl.layers.rope_types import ROPE_TYPES, RopeSettings


class Rotation(NamedTuple):
    """The rotation of each token of a step, for all layers and heads.

    Args:
        cos: [T, 1, head_dim].
        sin: [T, 1, head_dim], the first half negated.
    """

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary(nn.Module):
    """cos and sin of every position and frequency.

    The table is a buffer with real memory from the start: a model is built on the meta device, where arithmetic has no
    values, and unlike a parameter the table is in no checkpoint.

    Args:
        head_dim: width of a head, even.
        max_positions: rows of the table.
        rope: type and settings.
    """

    table: torch.Tensor
    """float32[max_positions, head_dim]: cos in the first half of a row, sin in the second."""

    def __init__(self, head_dim: int, max_positions: int, rope: RopeSettings) -> None:
        super().__init__()
        with torch.device("cpu"):
            inv_freq, attention_factor = resolve("rope_type", rope.rope_type, ROPE_TYPES)(rope, head_dim)
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
            table = torch.cat([angles.cos(), angles.sin()], dim=-1) * attention_factor
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Rows of the table for ``positions`` ([T] int32), in ``dtype``."""
        rows = self.table.index_select(0, positions).to(dtype).unsqueeze(1)
        cos, sin = rows.chunk(2, dim=-1)
        return Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) by the angle of its position and frequency.

    Args:
        x: [T, heads, head_dim]; queries and keys can go in together.
        rotation: of the same T tokens.
    """
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.sin)
