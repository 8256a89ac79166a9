"""Rotary position embedding (Su et al. 2021), with the frequency scalings that checkpoints ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.registry import Registry, resolve


@dataclass(frozen=True)
class RopeSettings:
    """The ``rope_parameters`` of a config."""

    rope_type: str = "default"  # a name in `ROPE_TYPES`, or "module:function"
    theta: float = 10000.0  # base of the geometric sequence of wavelengths
    scaling: Mapping[str, Any] = field(default_factory=dict)  # the type's other settings: factor, beta_fast …
    rotated: float = 1.0  # part of a head's elements that are rotated; those behind them stay as they are
    interleaved: bool = False  # checkpoints have the two elements of a pair side by side, not half of them apart

    def head_order(self, head_dim: int) -> list[int] | None:
        """The checkpoint's place of each element of a head that `rotate` works on; None if it is the same.

        `rotate` pairs elements half a head apart. A dot product doesn't care about the order of its terms, so we give
        queries and keys of all models that order, when their weights are loaded, and have one rotation for all.
        """
        width = int(head_dim * self.rotated)
        rest = range(width, head_dim)
        pairs = (range(0, width, 2), range(1, width, 2)) if self.interleaved else _halves(range(width))
        order = [i for pair, still in zip(pairs, _halves(rest), strict=True) for i in (*pair, *still)]
        return None if order == list(range(head_dim)) else order


NO_POSITIONS = RopeSettings("none")
"""Layers that do not see positions, but through the causal mask (NoPE, Kazemnejad et al. 2023)."""


def _halves(elements: range) -> tuple[range, range]:
    return elements[: len(elements) // 2], elements[len(elements) // 2 :]


class Rotation(NamedTuple):
    """cos and sin of each token of a step, both [T, 1, head_dim]. The first half of ``sin`` is negated."""

    cos: torch.Tensor
    sin: torch.Tensor


class Rotary(nn.Module):
    """A table of cos and sin for every position and frequency, which all layers share."""

    table: torch.Tensor
    """float32[max_positions, head_dim]: cos in the first half of a row, sin in the second."""

    def __init__(self, head_dim: int, max_positions: int, rope: RopeSettings) -> None:
        super().__init__()
        width = int(head_dim * rope.rotated)
        with torch.device("cpu"):  # not on the meta device like the parameters: no checkpoint has this table
            inv_freq, attention_factor = resolve("rope_type", rope.rope_type, ROPE_TYPES)(rope, width)
            angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * inv_freq
            cos, sin = angles.cos() * attention_factor, angles.sin() * attention_factor
            still = (0, (head_dim - width) // 2)  # pairs that are rotated by an angle of zero
            table = torch.cat([F.pad(cos, still, value=1.0), F.pad(sin, still)], dim=-1)
        self.register_buffer("table", table, persistent=False)

    def forward(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Look up the rotations of ``positions`` ([T] int32), in ``dtype``."""
        rows = self.table.index_select(0, positions).to(dtype).unsqueeze(1)
        cos, sin = rows.chunk(2, dim=-1)
        return Rotation(torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1))


def rotate(x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate each pair (x[i], x[i + head_dim / 2]) of ``x``, [T, heads, head_dim], by the angle of its position and
    frequency."""
    swapped = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * rotation.cos, swapped, rotation.sin)


# A rope type maps (settings, head_dim) to the frequencies, float32[head_dim / 2] in radians a position, and to a factor
# for cos and sin. If only a part of a head is rotated, head_dim is the width of that part.


def default_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """RoPE as published (Su et al. 2021)."""
    return 1.0 / _wavelengths(rope, head_dim), 1.0


def no_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Angles of zero: a layer that rotates by them leaves queries and keys alone."""
    return torch.zeros(head_dim // 2), 1.0


def linear_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Position interpolation (Chen et al. 2023): divide all positions by ``factor``."""
    return 1.0 / _wavelengths(rope, head_dim) / rope.scaling["factor"], 1.0


def llama3_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """Llama 3.1: divide low frequencies by ``factor``, keep high ones, and blend between."""
    low, high = rope.scaling["low_freq_factor"], rope.scaling["high_freq_factor"]
    inv_freq = 1.0 / _wavelengths(rope, head_dim)
    turns = rope.scaling["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1.0 - keep) * inv_freq / rope.scaling["factor"] + keep * inv_freq, 1.0


def yarn_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """YaRN (Peng et al. 2023): keep dimensions that turn often in the original context, interpolate those that turn
    less than once, with a linear ramp between; a factor sharpens attention."""
    factor = rope.scaling["factor"]
    original = rope.scaling["original_max_position_embeddings"]

    def dimension_with(turns: float) -> float:  # fractional; the turns are those in the original context
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    first = dimension_with(rope.scaling.get("beta_fast") or 32.0)
    last = dimension_with(rope.scaling.get("beta_slow") or 1.0)
    if rope.scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001  # as the reference does: a ramp needs a width
    keep = 1.0 - ((torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0.0, 1.0)
    wavelengths = _wavelengths(rope, head_dim)
    inv_freq = (1.0 - keep) * (1.0 / (factor * wavelengths)) + keep * (1.0 / wavelengths)
    return inv_freq, _yarn_attention_factor(rope.scaling)


def longrope_frequencies(rope: RopeSettings, head_dim: int) -> tuple[torch.Tensor, float]:
    """LongRoPE (Ding et al. 2024): a factor for each frequency, found by search, of which checkpoints have two sets.

    transformers changes from the short set to the long one when a sequence outgrows the original context, and computes
    all keys anew. Ours are in the cache, so an engine keeps one set: the short one if no sequence can outgrow it.
    """
    original, factor = rope.scaling["original_max_position_embeddings"], rope.scaling["factor"]
    which = "short_factor" if rope.scaling.get("longest", math.inf) <= original else "long_factor"
    stretch = torch.tensor(rope.scaling[which], dtype=torch.float32)
    attention_factor = rope.scaling.get("attention_factor")
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return 1.0 / (stretch * _wavelengths(rope, head_dim)), float(attention_factor)


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
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
    "longrope": longrope_frequencies,
    "none": no_frequencies,
}
