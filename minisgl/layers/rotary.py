"""Rotary position embedding (Su et al. 2021), with the frequency scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from minisgl.registry import Registry, resolve


@dataclass(frozen=True)
class RopeSettings:
    """The ``rope_parameters`` of a config.

    Args:
        rope_type: a name in `ROPE_TYPES`, or ``"module:function"``.
        theta: base of the geometric sequence of wavelengths.
        scaling: what else the type reads, under the names that configs use (``factor``, ``beta_fast`` …).
    """

    rope_type: str = "default"
    theta: float = 10000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)


def default_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """RoPE as published (Su et al. 2021)."""
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def linear_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al. 2023): all positions are divided by ``factor``."""
    return 1.0 / _wavelengths(rope, head_dim) / rope.scaling["factor"], 1.0


def llama3_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, those between blended."""
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    inv_freq = 1.0 / _wavelengths(rope, head_dim)
    turns = rope.scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / rope.scaling["factor"] + keep * inv_freq, 1.0


def yarn_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): dimensions that turn often in the original context are kept, those that turn less than
    once are interpolated, with a linear ramp over the dimensions between; attention is sharpened by a factor."""
    factor = rope.scaling["factor"]
    original = rope.scaling["original_max_position_embeddings"]

    def dimension_with(turns: float) -> float:
        """The (fractional) dimension that turns this often in the original context."""
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_with(rope.scaling.get("beta_fast") or 32.0)
    last = dimension_with(rope.scaling.get("beta_slow") or 1.0)
    if rope.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as the reference does: a ramp needs a width
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    wavelengths = _wavelengths(rope, head_dim)
    return ramp / (factor * wavelengths) + (1.0 - ramp) / wavelengths, _yarn_attention_factor(rope.scaling)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    """The factor given; else that of ``mscale`` over that of ``mscale_all_dim``; else the paper's."""
    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])

    def sharpening(mscale: float) -> float:
        return 0.1 * mscale * math.log(scaling["factor"]) + 1.0 if scaling["factor"] > 1 else 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return sharpening(scaling["mscale"]) / sharpening(scaling["mscale_all_dim"])
    return sharpening(1.0)


def _wavelengths(rope: RopeSettings, head_dim: int) -> torch.Tensor:
    """Positions a radian for each pair of dimensions, float32[head_dim / 2]."""
    exponents: torch.Tensor = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return torch.pow(rope.theta, exponents)


ROPE_TYPES: Registry[Callable[[RopeSettings, int], tuple[torch.Tensor, float]]] = {
    "default": default_frequencies,
    "linear": linear_frequencies,
    "llama3": llama3_frequencies,
    "yarn": yarn_frequencies,
}


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
