"""One request's text as its reader gets it: detokenised as it comes, and cut before a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.tokenizer.detokenizer import IncrementalDetokenizer
from minisgl.tokenizer.stop_strings import StopStrings
from minisgl.tokenizer.tokenizer import Tokenizer


class TextStream:
    """Tokens in, text out. A checkpoint without a tokenizer gives no text.

    Args:
        tokenizer: the model's.
        stop: strings that end the text.
        min_tokens: how many tokens come before a stop string counts.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self._detokenizer = IncrementalDetokenizer(tokenizer) if tokenizer.available else None
        self._stop = StopStrings(stop)
        self._min_tokens = min_tokens
        self._num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has come: no text will follow."""
        return self._stop.matched is not None

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take new tokens; returns the text that may be shown. With stop strings, give one token at a time: else
        nobody knows which of them ended the text."""
        text = "" if self._detokenizer is None else self._detokenizer.feed(token_ids)
        self._num_tokens += len(token_ids)
        return self._stop.feed(text) if self._num_tokens > self._min_tokens else text

    def finish(self) -> str:
        """The rest of the text, after the last token."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._stop.feed(self._detokenizer.finish()) + self._stop.finish()
