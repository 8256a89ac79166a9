"""What attention layers read while a model runs: the step's tensors, and the attention backend to call."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from minisgl.batch import DeviceBatch

if TYPE_CHECKING:
    from minisgl.batch import Batch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """The constants of one attention layer."""

    layer_id: int  # index of the layer's KV in the cache
    num_heads: int  # query heads on this rank, a multiple of the KV heads (GQA, Ainslie et al. 2023)
    num_kv_heads: int
    head_dim: int
    scale: float  # factor on q·k, usually head_dim ** -0.5
    sliding_window: int | None = None  # most recent positions that a token sees, itself included; None sees all
    soft_cap: float | None = None  # a scaled score s becomes cap × tanh(s / cap), which stays below the cap
    # A score for each query head, [num_heads], that takes part in the softmax and has no value: attention that goes
    # there goes nowhere (attention sinks, Xiao et al. 2024, learned as in gpt-oss).
    sinks: torch.Tensor | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The attention backends that an engine uses, by name. The names are equal if one backend attends for all rows."""

    prefill: str
    decode: str
    reason: str  # why these, for the log

    @property
    def name(self) -> str:
        """One name, or two as ``"flashinfer + cascade"``."""
        return self.prefill if self.prefill == self.decode else f"{self.prefill} + {self.decode}"


ATTENTION_FEATURES = frozenset({"soft_cap", "sinks"})
"""Fields of `AttentionSpec` that not every backend knows. A backend that does names them in ``features``."""


class AttentionBackend(Protocol):
    """Computes causal attention of a batch: `plan` runs once a step on the host, `forward` once a layer."""

    # Whether `forward` may be captured in a CUDA graph. For decode steps it then only launches work, waits for nothing,
    # and reads memory that keeps its address and that the next `plan` for as many rows refreshes.
    capturable: bool
    # Whether steps with prefill rows may be captured too, with `DeviceBatch.padded` inputs: then steps with equal keys
    # and equal sizes of their inputs launch the same kernels, whatever the lengths of their rows.
    captures_prefill: bool

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Prepare for one step. ``batch`` has the lengths on the host, ``inputs`` the same batch on the device.

        Returns a key of the work that `forward` will launch. Decode steps with equal keys and numbers of rows launch
        the same kernels with the same arguments, so one CUDA graph serves them.
        """
        ...

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Store this step's keys and values, then attend. A token sees the positions up to and including its own.

        ``q`` and the result are [T, num_heads, head_dim] of one dtype; ``k`` and ``v`` [T, num_kv_heads, head_dim]; T
        as in `Batch`. Rotary embedding is applied already.
        """
        ...


class KVTensors(Protocol):
    """Keys and values of all layers, [layers, pages, page_size, num_kv_heads, head_dim] each."""

    k: torch.Tensor
    v: torch.Tensor

    def layer(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of one layer."""
        ...


class PagedAttentionBackend(ABC):
    """An `AttentionBackend` that stores keys and values first and then attends, so that a fused kernel can store."""

    kv_cache: KVTensors

    @abstractmethod
    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attend over the stored keys and values, this step's included. Shapes as in `AttentionBackend.forward`."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """One step, as the layers see it."""

    inputs: DeviceBatch
    attention: AttentionBackend  # already planned for this step


_CURRENT: ContextVar[ForwardContext] = ContextVar("minisgl_forward_context")


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[ForwardContext]:
    """Make ``context`` the current one inside the ``with`` block."""
    token = _CURRENT.set(context)
    try:
        yield context
    finally:
        _CURRENT.reset(token)


def get_forward_context() -> ForwardContext:
    """Return the current context. Raises `RuntimeError` outside of a `forward_context` block."""
    try:
        return _CURRENT.get()
    except LookupError:
        raise RuntimeError("no forward context: run the model inside `with forward_context(...)`") from None
