"""How tensor-parallel ranks share a model: the communicator that joins them, and the shards of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from minisgl.errors import ConfigError


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


@dataclass(frozen=True, slots=True)
class Shard:
    """Elements ``start … stop`` of a dimension that has ``total`` of them.

    The last ranks' shares of a vocabulary may reach beyond ``total``; what lies there is padding that no checkpoint
    fills.
    """

    start: int
    stop: int
    total: int

    @property
    def size(self) -> int:
        """Elements on this rank, padding included."""
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        """Whether one rank has it all."""
        return self.start == 0 and self.stop == self.total

    def of_width(self, width: int) -> Shard:
        """The same share where every element is ``width`` rows wide, as a head is ``head_dim`` rows."""
        return Shard(self.start * width, self.stop * width, self.total * width)


def whole(size: int) -> Shard:
    """All of ``size`` elements."""
    return Shard(0, size, size)


def divide(name: str, size: int, ranks: RankInfo) -> Shard:
    """An equal share for every rank.

    Args:
        name: of the size in ``config.json``, for the error.
        size: elements in all.
        ranks: those that share them, and which of them this is.

    Raises:
        ConfigError: the ranks cannot share them equally.
    """
    if size % ranks.size:
        raise ConfigError(
            f"tensor_parallel_size: {ranks.size} ranks cannot share {name} of {size} equally; choose a divisor of it"
        )
    each = size // ranks.size
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, size)


def divide_kv_heads(num_kv_heads: int, ranks: RankInfo) -> Shard:
    """An equal share of the KV heads. Where there are fewer heads than ranks, neighbouring ranks hold the same one,
    which is the one that their query heads share.

    Raises:
        ConfigError: neither the heads are a multiple of the ranks, nor the ranks of the heads.
    """
    if ranks.size <= num_kv_heads or ranks.size % num_kv_heads:
        return divide("num_key_value_heads", num_kv_heads, ranks)
    head = ranks.rank * num_kv_heads // ranks.size
    return Shard(head, head + 1, num_kv_heads)


def divide_vocabulary(vocab_size: int, ranks: RankInfo) -> Shard:
    """An equal share of the vocabulary, padded at its end to a multiple of the ranks."""
    each = -(-vocab_size // ranks.size)
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, vocab_size)


def weight(*shape: int) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient; the loader gives it memory, a dtype and values."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of a checkpoint tensor that a rank reads: a shard of one dimension, and all of the others.

    Args:
        dim: the dimension.
        shard: of it.
    """

    dim: int
    shard: Shard

    @property
    def index(self) -> tuple[slice, ...]:
        """What is read, as an index of the checkpoint tensor."""
        start, stop, total = self.shard.start, self.shard.stop, self.shard.total
        return (*(slice(None),) * self.dim, slice(min(start, total), min(stop, total)))


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One checkpoint tensor, and the region of a parameter that it fills.

    Args:
        source: the tensor's name in the checkpoint, relative to the parent of the module that owns the parameter.
        parameter: the parameter's name in its module.
        index: the region, ``module.<parameter>[index]``; it has the shape of the tensor, or of its shard.
        shard_spec: what this rank reads of the tensor; None is all of it.
    """

    source: str
    parameter: str
    index: tuple[int | slice, ...]
    shard_spec: ShardSpec | None = None


@runtime_checkable
class PackedWeights(Protocol):
    """A module some of whose parameters hold several checkpoint tensors.

    A parameter that no part mentions is filled by the checkpoint tensor of its own full name.
    """

    def weight_parts(self) -> list[WeightPart]:
        """The declared mapping from checkpoint tensors to regions of this module's parameters."""
        ...


@runtime_checkable
class ShardedParameters(Protocol):
    """A module some of whose parameters hold a rank's shard of the checkpoint tensor of their own name."""

    def shard_specs(self) -> dict[str, ShardSpec]:
        """By the parameter's name: what this rank reads of the tensor."""
        ...
