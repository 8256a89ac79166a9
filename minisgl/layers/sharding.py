"""Tensor parallelism, as the layers see it: ranks, their collectives, and each rank's shard of a weight.

Each rank holds a shard of every large weight, and two all-reduces a decoder layer add up what the ranks have computed
(Megatron-LM, Shoeybi et al. 2019). With one rank, a shard is the whole weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from minisgl.errors import ConfigError


class RankInfo(Protocol):
    """Which rank this is, from 0, and how many there are. That decides which shards it holds."""

    rank: int
    size: int


class Communicator(RankInfo, Protocol):
    """The collectives of the ranks. A subclass without a fused kernel inherits the last two methods.

    All ranks call them in the same order, with tensors of the same shape and dtype, and get the same bits.
    """

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        """Sum ``x`` over the ranks. The result has its shape and dtype, and may be ``x`` itself, overwritten."""
        ...

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Concatenate every rank's ``x``, [T, n], in the order of the ranks: [T, size × n]."""
        ...

    def fuses_norm(self, x: torch.Tensor) -> bool:
        """Whether `all_reduce_and_norm` takes ``x``, [T, hidden_size]. Depends on shape and dtype alone."""
        return False

    def all_reduce_and_norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All-reduce ``x``, add the residual stream and apply RMSNorm, in one kernel.

        Returns the normalised sum, [T, hidden_size], and the residual stream, which may be spread over the ranks: pass
        it only to the next call with as many rows.
        """
        raise RuntimeError("this communicator has no such kernel; ask `fuses_norm` first")


class SingleRank(Communicator):
    """The only rank: it holds the whole model, and its sums are complete."""

    rank = 0
    size = 1

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


SINGLE_RANK: Communicator = SingleRank()


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's part of a dimension: elements ``start`` to ``stop`` (exclusive) of ``total``."""

    start: int
    stop: int  # beyond `total` if the last rows of a vocabulary are padding
    total: int

    @classmethod
    def whole(cls, total: int) -> Shard:
        return cls(0, total, total)

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self == Shard.whole(self.total)

    def times(self, width: int) -> Shard:
        """The same shard in smaller elements: a shard of heads, times ``head_dim``, is one of rows."""
        return Shard(self.start * width, self.stop * width, self.total * width)


def divide(name: str, size: int, ranks: RankInfo) -> Shard:
    """This rank's equal shard of ``size`` elements (``name`` in ``config.json``); `ConfigError` if there is none."""
    if size % ranks.size:
        raise ConfigError(
            f"tensor_parallel_size: {ranks.size} ranks cannot share {name} of {size} equally; choose a divisor of it"
        )
    each = size // ranks.size
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, size)


def divide_kv_heads(num_kv_heads: int, ranks: RankInfo) -> Shard:
    """This rank's equal shard of the KV heads. If there are more ranks than heads, neighbours hold the same head.

    Raises `ConfigError` if neither number is a multiple of the other.
    """
    if ranks.size <= num_kv_heads or ranks.size % num_kv_heads:
        return divide("num_key_value_heads", num_kv_heads, ranks)
    head = ranks.rank * num_kv_heads // ranks.size
    return Shard(head, head + 1, num_kv_heads)


def divide_vocabulary(vocab_size: int, ranks: RankInfo) -> Shard:
    """This rank's equal shard of the vocabulary, padded at its end to a multiple of the number of ranks."""
    each = -(-vocab_size // ranks.size)
    return Shard(ranks.rank * each, (ranks.rank + 1) * each, vocab_size)


def empty_parameter(*shape: int) -> nn.Parameter:
    """An uninitialised parameter without gradient; the loader gives it memory, a dtype and values."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


def take_over(replacement: nn.Module, plain: nn.Module) -> None:
    """Share all parameters, submodules and settings of ``plain``. Stands in for the parent's constructor, which would
    allocate new ones."""
    state = {name: value.copy() if isinstance(value, dict) else value for name, value in vars(plain).items()}
    vars(replacement).update(state)


class Sliceable(Protocol):
    """A tensor, or a safetensors slice, which reads from the file only what is asked for."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class ShardSpec:
    """The part of a checkpoint tensor that a rank reads: a shard of one dimension, and all of the others.

    A packed tensor is several ones behind each other in that dimension, of each of which the rank reads a shard.
    """

    dim: int
    shard: Shard
    behind: tuple[Shard, ...] = ()  # of the second tensor in a packed one, and so on

    @property
    def shards(self) -> tuple[Shard, ...]:
        return (self.shard, *self.behind)

    @property
    def total(self) -> int:
        """Size of the whole tensor in this dimension."""
        return sum(shard.total for shard in self.shards)

    def of(self, tensor: Sliceable) -> torch.Tensor:
        """Read the part from a whole checkpoint tensor, or from a slice of a file, without padding."""
        parts, first = [], 0
        for shard in self.shards:
            begin, end = (first + min(edge, shard.total) for edge in (shard.start, shard.stop))
            parts.append(tensor[(*(slice(None),) * self.dim, slice(begin, end))])
            first += shard.total
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)


@runtime_checkable
class ShardedParameters(Protocol):
    """A module with parameters that hold a shard of the checkpoint tensor of the same name."""

    def shard_specs(self) -> dict[str, ShardSpec]:
        """Parameter name → what this rank reads of the tensor."""
        ...


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One checkpoint tensor, and the region ``parameter[index]`` that it, or this rank's shard of it, fills."""

    source: str  # the tensor's name, relative to the parent of the module that owns the parameter
    parameter: str
    index: tuple[int | slice, ...]
    shard_spec: ShardSpec | None = None


@runtime_checkable
class PackedWeights(Protocol):
    """A module with parameters that hold several checkpoint tensors each, declared as parts."""

    def weight_parts(self) -> list[WeightPart]: ...
