"""The forward context: what every layer needs to know about the current step without being told by its caller.

The alternative is to pass batch and backend through every ``forward`` of every module. That is easier to trace and
noisier to read; engines settle on one well-kept global. Ours is a context variable (so two engines in two threads do
not meet), set and reset by one ``with`` statement and by nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

from minisgl.core.attention import AttentionBackend
from minisgl.core.batch import DeviceBatch


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
