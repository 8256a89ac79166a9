"""From tokens to text, while they come: whole characters only, cut before a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from minisgl.tokenizer import Tokenizer


def complete_characters(data: bytes) -> tuple[str, bytes]:
    """The text of ``data``, and the bytes at its end that may still become a character.

    Each byte that belongs to no character becomes one U+FFFD.
    """
    text = ""
    while True:
        try:
            return text + data.decode(), b""
        except UnicodeDecodeError as error:
            text += data[: error.start].decode()
            if error.reason == "unexpected end of data":
                return text, data[error.start :]
            text += "\ufffd" * (error.end - error.start)
            data = data[error.end :]


REPLACEMENT = "\ufffd"
_MAX_UNREAD = 32
"""Tokens after which the window moves on even where no character ends; also most that are decoded at once."""


class IncrementalDetokenizer:
    """Turns one request's tokens into text piece by piece. The text is that of its tokens, however they were cut up.

    A token's text depends on its neighbours: a character may be spread over several tokens, and some tokenizers drop
    the space before a first word. So a short window of tokens is decoded at every step, never the whole output, and
    three offsets tell what is new (the scheme of vLLM and SGLang)::

        all tokens:  forgotten | surrogate context | unread ...    |
                               surrogate           read            end
        window's text:         | sent already      ·    | held back |
                               0                        sent        end

    The text leaves up to the last complete character: only U+FFFD at the very end may still become another one. Where
    nothing is held back the window moves on: the tokens just read become the context of the next ones.

    With byte fallback (Llama 2), characters outside of the vocabulary are spelled in byte tokens, one a byte. Decoding
    these would let one wrong byte spoil all bytes beside it, those included whose text has left. So they are put
    together here, and each byte that belongs to no character becomes one U+FFFD, as it would alone.

    Args:
        tokenizer: the model's tokenizer; special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0
        self._sent = 0
        self._bytes = b""
        """The beginning of a character that byte tokens spell."""

    def feed(self, token_ids: int | Iterable[int]) -> str:
        """Take one token or several; returns the text that is complete now, often empty."""
        ids = (token_ids,) if isinstance(token_ids, int) else token_ids
        spoken = [token_id for token_id in ids if token_id not in self._tokenizer.special_ids]
        pieces = []
        for spells_bytes, group in groupby(spoken, key=self._tokenizer.byte_tokens.__contains__):
            run = list(group)
            pieces.append(self._feed_bytes(run) if spells_bytes else self._feed_text(run))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest of the text. A character that never became complete is shown as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._sent :] + self._end_bytes()

    def _feed_bytes(self, token_ids: Iterable[int]) -> str:
        values = bytes(self._tokenizer.byte_tokens[token_id] for token_id in token_ids)
        text, self._bytes = complete_characters(self._bytes + values)
        if text and not self._window:  # what comes next is no beginning of a text any more
            self._window = list(self._tokenizer.anchor)
            self._move(unsent=0)
        return text

    def _end_bytes(self) -> str:
        broken, self._bytes = len(self._bytes), b""
        return REPLACEMENT * broken

    def _feed_text(self, token_ids: Sequence[int]) -> str:
        chunks = range(0, len(token_ids), _MAX_UNREAD)
        return self._end_bytes() + "".join(self._feed_chunk(token_ids[at : at + _MAX_UNREAD]) for at in chunks)

    def _feed_chunk(self, token_ids: Sequence[int]) -> str:
        self._window += token_ids
        text = self._tokenizer.decode(self._window)
        held = not self._tokenizer.byte_tokens and text.endswith(REPLACEMENT)
        piece = text[self._sent : len(text) - held]
        self._sent += len(piece)
        if (piece and not held) or len(self._window) - self._read > _MAX_UNREAD:
            self._move(unsent=len(text) - self._sent)
        return piece

    def _move(self, unsent: int) -> None:
        """Forget the context, make the unread tokens the new one, and find the sent offset again from its end."""
        context = self._window[self._read :]
        text = self._tokenizer.decode(context)
        if not text:  # they are no context where they have no text by themselves
            context = self._window[: self._read]
            text = self._tokenizer.decode(context)
        self._window, self._read, self._sent = context, len(context), len(text) - unsent


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
