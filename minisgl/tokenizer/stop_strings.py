"""Stop strings in streamed text: what may be the beginning of one is held back until it is known not to be."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one request's text for strings that end it.

    The string that is complete first counts, the longest if several end at the same character: what an observer who
    reads character by character would see, however the text is cut into pieces.

    Args:
        strings: the stop strings, none of them empty.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = strings
        self._held = ""
        self.matched: str | None = None
        """The stop string that was found, or None."""

    def feed(self, piece: str) -> str:
        """Take the next piece of text; returns what may be shown. After a match that is nothing."""
        if self.matched is not None:
            return ""
        text = self._held + piece
        matches = [(start + len(stop), start, stop) for stop in self._strings if (start := text.find(stop)) >= 0]
        if matches:
            _, start, self.matched = min(matches)
            self._held = ""
            return text[:start]
        keep = max((_overlap(text, stop) for stop in self._strings), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """The text held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of ``text`` that is a beginning of ``stop``, but not all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
