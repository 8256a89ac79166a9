"""Text in place of tokens: the last station of a state on its way to a page."""

from __future__ import annotations

from functools import lru_cache

import msgspec

from minisgl.server.live.state import LiveState
from minisgl.tokenizer import Tokenizer

_REMEMBERED = 4096
"""Texts of nodes and requests that are kept, because the next state has most of them again."""


class Spelled:
    """Writes states as JSON, each once for all who watch.

    Args:
        tokenizer: the model's. If the checkpoint has none, the ids are shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spell = lru_cache(_REMEMBERED)(self._text)
        self._state: LiveState | None = None
        self._json = b""

    def json(self, state: LiveState) -> bytes:
        """The state with its texts, in one line."""
        if state is not self._state:
            for node in state.nodes:
                node.text = self._spell(tuple(node.head))
            for request in state.requests:
                request.text = self._spell(tuple(request.tail))
            self._state, self._json = state, msgspec.json.encode(state)
        return self._json

    def _text(self, token_ids: tuple[int, ...]) -> str:
        if not self._tokenizer.available:
            return " ".join(map(str, token_ids))
        return self._tokenizer.spell(token_ids)
