"""From tokens to text as they come: whole characters only, cut before a stop string."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import groupby

from minisgl.tokenizer import Tokenizer


def complete_characters(data: bytes) -> tuple[str, bytes]:
    """Decode UTF-8, a U+FFFD for each wrong byte; return also the bytes at the end that may begin a character."""
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
_MAX_UNREAD = 32  # tokens after which the window moves on even inside a character; also most that are decoded at once


class IncrementalDetokenizer:
    """Turns one request's tokens into text, piece by piece.

    A token's text depends on its neighbours: a character may be spread over several tokens, and some tokenizers drop
    the space before a first word. So each step decodes a short window of tokens (the scheme of vLLM and SGLang)::

        all tokens:  forgotten | surrogate context | unread ...    |
                               surrogate           read            end
        window's text:         | sent already      ·    | held back |
                               0                        sent        end

    A U+FFFD at the very end may still become a character and is held back; else the window moves on. Byte tokens (byte
    fallback, Llama 2) are decoded here, since the tokenizer would let one wrong byte spoil its neighbours.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0
        self._sent = 0
        self._bytes = b""  # the beginning of a character that byte tokens spell

    def feed(self, token_ids: int | Iterable[int]) -> str:
        """Take one token or several, and return the text that is complete now, often empty."""
        ids = (token_ids,) if isinstance(token_ids, int) else token_ids
        spoken = [token_id for token_id in ids if token_id not in self._tokenizer.special_ids]
        pieces = []
        for spells_bytes, group in groupby(spoken, key=self._tokenizer.byte_tokens.__contains__):
            run = list(group)
            pieces.append(self._feed_bytes(run) if spells_bytes else self._feed_text(run))
        return "".join(pieces)

    def finish(self) -> str:
        """Return the rest of the text. An incomplete character becomes U+FFFD."""
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
        """Drop the context, make the unread tokens the new one, and compute the sent offset anew from its end."""
        context = self._window[self._read :]
        text = self._tokenizer.decode(context)
        if not text:  # tokens without text cannot serve as context
            context = self._window[: self._read]
            text = self._tokenizer.decode(context)
        self._window, self._read, self._sent = context, len(context), len(text) - unsent


class StopStrings:
    """Finds the first of several non-empty strings in a text that comes in pieces, and cuts the text before it.

    The string that is complete first counts; of several that end at the same character, the longest.
    """

    def __init__(self, strings: Sequence[str]) -> None:
        self._strings = tuple(sorted(strings))
        self._first_letters = {string[0] for string in strings}
        self._held = ""  # the longest end of the text that may become a stop string
        self.matched: str | None = None  # the string that was found

    def feed(self, piece: str) -> str:
        """Take the next piece of text, and return what may be shown: after a match, nothing."""
        if self.matched is not None:
            return ""
        if not self._held and self._first_letters.isdisjoint(piece):  # the usual case, and the quick one
            return piece
        text, held = self._held + piece, self._held
        for end, letter in enumerate(piece, len(held) + 1):
            held = _overlap(held + letter, self._strings)
            if held.endswith(self._strings):
                self.matched = max(filter(held.endswith, self._strings), key=len)
                self._held = ""
                return text[: end - len(self.matched)]
        self._held = held
        return text[: len(text) - len(held)]

    def finish(self) -> str:
        """Return the text that was held back for a stop string that never came."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, strings: Sequence[str]) -> str:
    """The longest end of ``text`` that one of the sorted ``strings`` begins with, or is; empty if there is none.

    What a letter makes longer, or drops, is all that is looked at: the idea of Aho and Corasick's automaton (1975).
    """
    for start in range(len(text)):
        end = text[start:]
        at = bisect_left(strings, end)  # strings that begin with it come next in the order
        if at < len(strings) and strings[at].startswith(end):
            return end
    return ""


class TextStream:
    """Detokenizes one request up to its stop strings, which count after ``min_tokens`` tokens."""

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
        """Take new tokens, and return the text that may be shown. With stop strings, feed one token at a time."""
        text = "" if self._detokenizer is None else self._detokenizer.feed(token_ids)
        self._num_tokens += len(token_ids)
        return self._stop.feed(text) if self._num_tokens > self._min_tokens else text

    def finish(self) -> str:
        """Return the rest of the text, after the last token."""
        if self._detokenizer is None or self.stopped:
            return ""
        return self._stop.feed(self._detokenizer.finish()) + self._stop.finish()
