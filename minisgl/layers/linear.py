"""Linear layers: single, packed, and divided among ranks."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from minisgl.core import ALONE, Communicator
from minisgl.layers.blocked import linear
from minisgl.layers.shares import Share, whole
from minisgl.layers.weights import Cut, WeightPart, weight


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

    Where ranks share the model, each has some rows of every projection, and computes some of its outputs: the
    projections are column-parallel, named after the columns of Wᵀ (Megatron-LM, Shoeybi et al. 2019).

    Args:
        in_features: width of the input.
        parts: checkpoint name → rows of each projection, or this rank's share of them, in the order in which the
            outputs are laid out.
        bias: whether all of them have a bias.
    """

    def __init__(self, in_features: int, parts: Mapping[str, int | Share], bias: bool = False) -> None:
        shares = {name: whole(rows) if isinstance(rows, int) else rows for name, rows in parts.items()}
        super().__init__(in_features, sum(share.size for share in shares.values()), bias)
        self.parts = shares

    def weight_parts(self) -> list[WeightPart]:
        parameters = ["weight"] if self.bias is None else ["weight", "bias"]
        mapping: list[WeightPart] = []
        start = 0
        for name, share in self.parts.items():
            region, cut = (slice(start, start + share.size),), Cut(0, share)
            mapping += [WeightPart(f"{name}.{parameter}", parameter, region, cut) for parameter in parameters]
            start += share.size
        return mapping


class RowParallelLinear(Linear):
    """A linear layer whose input is divided among ranks, as `PackedLinear` leaves it: each multiplies what it has by
    the matching columns of W, and the sum over the ranks is the output.

    Args:
        in_features: this rank's share of the input.
        out_features: width of the output.
        bias: whether there is a b. Every rank holds it, and the first one adds it.
        communicator: joins the ranks. `kernels` that add up in their own way exchange it for `SingleRank`.
    """

    def __init__(
        self, in_features: Share, out_features: int, bias: bool = False, communicator: Communicator = ALONE
    ) -> None:
        super().__init__(in_features.size, out_features, bias)
        self.in_share = in_features
        self.is_first = communicator.rank == 0
        self.communicator = communicator

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, share of in_features] → [T, out_features]."""
        partial = linear(x, self.weight, self.bias if self.is_first else None)
        return self.communicator.all_reduce(partial)

    def weight_cuts(self) -> dict[str, Cut]:
        return {"weight": Cut(1, self.in_share)}
