"""What each of the server's worker processes is told when it is started."""

from __future__ import annotations

from minisgl.child_process import ChildOptions
from minisgl.core.config import EngineConfig


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
