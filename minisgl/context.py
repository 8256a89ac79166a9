"""What attention layers find while a model runs: the batch on the device, and the backend that attends."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from minisgl.batch import DeviceBatch

if TYPE_CHECKING:
    from minisgl.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """What is fixed about one attention layer.

    Args:
        layer_id: index of the layer's KV in the cache.
        num_heads, num_kv_heads: query and KV heads on this rank; the former is a multiple of the latter (GQA,
            Ainslie et al. 2023).
        head_dim: width of a head.
        scale: factor on q·k, usually ``head_dim ** -0.5``.
        sliding_window: number of most recent positions a token sees, itself included; None sees all.
    """

    layer_id: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    sliding_window: int | None = None


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The backends that an engine uses.

    Args:
        prefill, decode: their names; equal if one backend attends for all rows.
        reason: why these, for people to read.
    """

    prefill: str
    decode: str
    reason: str

    @property
    def name(self) -> str:
        """One name, or two as ``"flashinfer + cascade"``."""
        return self.prefill if self.prefill == self.decode else f"{self.prefill} + {self.decode}"


class AttentionBackend(Protocol):
    """Computes causal attention of a batch.

    `plan` runs once a step on the host, before the model; `forward` runs once a layer inside it.
    """

    capturable: bool
    """Whether `forward` may be recorded in a CUDA graph: for decode steps it then launches work only, waits for
    nothing, and reads only memory that keeps its address and that the next `plan` of as many rows refreshes."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Prepare for one step. ``batch`` has the lengths on the host, ``inputs`` the same batch on the device.

        Returns:
            Names the work that `forward` will launch: two decode steps with as many rows and equal answers launch the
            same kernels with the same arguments, so that a graph captured for one serves the other.
        """
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Store this step's keys and values, then attend. A token sees the positions up to and including its own.

        Args:
            q: [T, num_heads, head_dim], rotary embedding applied.
            k, v: [T, num_kv_heads, head_dim] of the fed tokens; T as in `Batch`.
            spec: the layer.

        Returns:
            [T, num_heads, head_dim], dtype of ``q``.
        """
        ...


class KVTensors(Protocol):
    """Keys and values of all layers, [layers, pages, page_size, num_kv_heads, head_dim] each."""

    k: torch.Tensor
    v: torch.Tensor


class PagedAttentionBackend(ABC):
    """An `AttentionBackend` over a KV cache that stores first and then attends, so that a fused kernel may do the
    storing."""

    kv_cache: KVTensors

    @abstractmethod
    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attend over what is stored, this step's own keys and values included.

        Args:
            q: [T, num_heads, head_dim], rotary embedding applied.
            spec: the layer.

        Returns:
            [T, num_heads, head_dim], dtype of ``q``.
        """


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as the layers see it.

    Args:
        inputs: the step's tensors.
        attention: the backend, already planned for this step.
    """

    inputs: DeviceBatch
    attention: AttentionBackend


_CURRENT: ContextVar[ForwardContext] = ContextVar("minisgl_forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the current one inside the ``with`` block, and restore the one before on any exit."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


def get_forward_context() -> ForwardContext:
    """The current context.

    Raises:
        RuntimeError: called outside of a `forward_context` block.
    """
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError("no forward context: run the model inside `with forward_context(...)`") from None
