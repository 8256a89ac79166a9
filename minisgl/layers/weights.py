"""How a layer declares its weights, and where in a checkpoint each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from minisgl.layers.shares import Shard


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
