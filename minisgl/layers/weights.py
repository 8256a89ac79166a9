"""How a layer declares its weights, and where in a checkpoint each comes from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


def weight(*shape: int) -> nn.Parameter:
    """An uninitialised parameter that needs no gradient; the loader gives it memory, a dtype and values."""
    return nn.Parameter(torch.empty(shape), requires_grad=False)


@dataclass(frozen=True, slots=True)
class WeightPart:
    """One checkpoint tensor, and the region of a parameter that it fills.

    Args:
        source: the tensor's name in the checkpoint, relative to the parent of the module that owns the parameter.
        parameter: the parameter's name in its module.
        index: the region, ``module.<parameter>[index]``; it has the shape of the tensor.
    """

    source: str
    parameter: str
    index: tuple[int | slice, ...]


@runtime_checkable
class PackedWeights(Protocol):
    """A module some of whose parameters hold several checkpoint tensors.

    A parameter that no part mentions is filled by the checkpoint tensor of its own full name.
    """

    def weight_parts(self) -> list[WeightPart]:
        """The declared mapping from checkpoint tensors to regions of this module's parameters."""
        ...
