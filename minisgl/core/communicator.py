"""What the layers of a model need of the other ranks, when several share the model."""

from __future__ import annotations

from typing import Protocol

import torch


class RankInfo(Protocol):
    """The place of a rank among those that compute one model together: enough to know what it holds."""

    rank: int
    """Which one this is, from 0."""
    size: int
    """How many there are."""


class Communicator(RankInfo, Protocol):
    """Joins the ranks. All of them call the same methods in the same order, with tensors of the same shape and dtype,
    and each gets the same bits back. A subclass without a fused kernel leaves the last two methods as they are."""

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """The sum of every rank's ``x``, same shape and dtype. It may be ``x`` itself, written over."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Every rank's ``x``, [T, n], side by side in the order of the ranks: [T, size × n]."""
        ...

    def fuses_norm(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce_and_norm` takes ``x``, [T, size]: one answer for a shape and dtype, on all ranks."""
        return False

    def all_reduce_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Sum ``x`` over the ranks, add the residual stream and normalise (RMSNorm), in one kernel.

        Args:
            x: [T, size], for which `fuses_norm` is true.
            residual: as ``x``, or what the call before has returned; None at the stream's source.
            weight: [size] of the norm.
            eps: of the norm.

        Returns:
            The normalised sum, [T, size], and the residual stream, which may be spread over the ranks: it goes into
            the next call with as many rows, and nowhere else.
        """
        raise RuntimeError("this communicator has no such kernel; ask `fuses_norm` first")


class SingleRank(Communicator):
    """A rank that has everything: all sums are complete."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """``x``."""
        return x


SINGLE_RANK: Communicator = SingleRank()
"""What every layer is built with unless told otherwise."""
