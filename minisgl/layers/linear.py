"""Linear layers, single and packed."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minisgl.layers.blocked import linear
from minisgl.layers.weights import WeightPart, weight


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


class PackedLinear(Linear):
    """Several projections of the same input as one matrix product, e.g. q, k and v: one large product keeps the
    machine busier than three small ones.

    Args:
        in_features: width of the input.
        parts: checkpoint name → rows of each projection, in the order in which the outputs are laid out.
        bias: whether all of them have a bias.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int], bias: bool = False) -> None:
        super().__init__(in_features, sum(parts.values()), bias)
        self.parts = dict(parts)

    def weight_parts(self) -> list[WeightPart]:
        parameters = ["weight"] if self.bias is None else ["weight", "bias"]
        mapping: list[WeightPart] = []
        start = 0
        for name, rows in self.parts.items():
            region = (slice(start, start + rows),)
            mapping += [WeightPart(f"{name}.{parameter}", parameter, region) for parameter in parameters]
            start += rows
        return mapping
