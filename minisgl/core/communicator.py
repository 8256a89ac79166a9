"""What the layers of a model need of the other ranks, when several share the model."""

from __future__ import annotations

from typing import Protocol

import torch


class Place(Protocol):
    """The place of a rank among those that compute one model together: enough to know what it holds."""

    rank: int
    """Which one this is, from 0."""
    size: int
    """How many there are."""


class Communicator(Place, Protocol):
    """Joins the ranks. All of them call the same methods in the same order, with tensors of the same shape and dtype,
    and each gets the same bits back."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``, same shape and dtype. It may be ``x`` itself, written over."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, [T, n], side by side in the order of the ranks: [T, size × n]."""
        ...


class SingleRank:
    """A rank that has everything: nobody to add to, nobody to ask."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x


ALONE: Communicator = SingleRank()
"""What every layer is built with unless told otherwise."""
