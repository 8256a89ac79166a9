"""``--trace FILE``: what the engine did last, kept while it serves and written when it stops."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from minisgl.engine_core import EngineCore
from minisgl.errors import ConfigError

MAX_EVENTS = 50_000
"""Events that are kept; a step has about six. Enough for some minutes of decoding, and for a file of some megabytes."""


@contextmanager
def recording(core: EngineCore, path: str) -> Iterator[None]:
    """Record the engine's steps inside the ``with`` block, and write the last ones in Chrome's trace format.

    Enter it before the engine's thread starts, and leave it after that has ended.

    Raises:
        ConfigError: the file cannot be written. This is found out at the beginning.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigError(f"trace: cannot write {path} ({error.strerror}); choose another file") from error
    with core.trace(limit=MAX_EVENTS) as trace:
        try:
            yield
        finally:
            trace.export(path)
