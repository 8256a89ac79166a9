"""Incremental detokenisation: text that leaves while tokens still arrive, and is never taken back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby

from minisgl.tokenizer.byte_tokens import complete_characters
from minisgl.tokenizer.tokenizer import Tokenizer

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
