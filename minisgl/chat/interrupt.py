"""Ctrl-C that waits until it does no harm."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Self


class Interrupt:
    """Inside a ``with`` block of the main thread, the first Ctrl-C waits for `look`; a second one comes at once.

    An engine that is interrupted in the middle of a step must end the step's requests and forget its prefix cache,
    because nobody knows what the step has written. Between two steps it only has to abort one request.
    """

    def __init__(self) -> None:
        self._waits = False

    def __enter__(self) -> Self:
        self._usual = signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        signal.signal(signal.SIGINT, self._usual)

    def look(self) -> None:
        """Raise the `KeyboardInterrupt` that waits, if one does."""
        if self._waits:
            self._waits = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._waits:
            raise KeyboardInterrupt
        self._waits = True
