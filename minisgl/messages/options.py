"""What each kind of child process is told when it is started."""

from __future__ import annotations

import msgspec

from minisgl.core.config import EngineConfig


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every child is told.

    Args:
        name: of the process, for log lines and for its socket.
        directory: of the sockets.
        log_format: ``"text"`` or ``"json"``.
        sweeps: whether this child removes the directory when the parent has died. It must outlive it for that, while
            the others are ended by the kernel.
    """

    name: str
    directory: str
    log_format: str = "text"
    sweeps: bool = False


class TokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """What a tokenizer is told.

    Args:
        model: directory of the checkpoint.
        limit: most tokens of a request, as far as it can be told before the engine is there.
    """

    model: str
    limit: int | None


class DetokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """What the detokenizer is told.

    Args:
        model: directory of the checkpoint.
    """

    model: str


class SchedulerOptions(ChildOptions, frozen=True, kw_only=True):
    """What the scheduler is told.

    Args:
        engine: all options of the engine.
        trace: file for a record of the engine's last steps, if one is wanted.
    """

    engine: EngineConfig
    trace: str | None = None
