"""Incremental detokenisation: text that leaves while tokens still arrive, and is never taken back."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.tokenizer.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD = 8
"""Replacement characters that may still turn into a real one: four bytes of a character and four of the one before."""
_MAX_UNREAD = 32
"""Tokens after which the window moves on even where no character ends."""


class IncrementalDetokenizer:
    """Turns one request's tokens into text piece by piece; the pieces add up to the text of all its tokens.

    A token's text depends on its neighbours: a character may be spread over several byte tokens, and some tokenizers
    drop the space before a first word. So a short window of tokens is decoded at every step, never the whole output,
    and three offsets tell what is new (the scheme of vLLM and SGLang)::

        window:   | surrounding context | unread ...       |   tokens
                  0                     read               end
        its text: | sent already              | held back  |   characters
                  0                           sent         end

    The text leaves up to the last complete character. Where that is the window's end, the window moves on: the tokens
    just read become the context of the next ones.

    Where tokens spell no valid UTF-8, U+FFFD leaves a few tokens late. With byte fallback (Llama 2) one wrong byte also
    spoils the bytes before it, up to the last whole word; what has left already stays as it was.

    Args:
        tokenizer: the model's tokenizer; special tokens give no text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._read = 0
        self._sent = 0

    def feed(self, token_ids: int | Iterable[int]) -> str:
        """Take one token or several; returns the text that is complete now, often empty."""
        ids = (token_ids,) if isinstance(token_ids, int) else token_ids
        return "".join(self._feed(token_id) for token_id in ids if token_id not in self._tokenizer.special_ids)

    def finish(self) -> str:
        """The rest of the text. A character that never became complete is shown as U+FFFD."""
        return self._tokenizer.decode(self._window)[self._sent :]

    def _feed(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._tokenizer.decode(self._window)
        held = min(len(text) - len(text.rstrip(_REPLACEMENT)), _MAX_HELD)
        piece = text[self._sent : len(text) - held]
        self._sent += len(piece)
        if (piece and not held) or len(self._window) - self._read > _MAX_UNREAD:
            self._move(unsent=max(0, len(text) - self._sent))
        return piece

    def _move(self, unsent: int) -> None:
        """Forget the context, make the unread tokens the new one, and find the sent offset again from its end."""
        self._window = self._window[self._read :]
        self._read = len(self._window)
        self._sent = len(self._tokenizer.decode(self._window)) - unsent
