"""Text to token ids and back for the endpoints that want nothing else, beside the engine and not in its way."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

from minisgl.errors import check_token_ids
from minisgl.messages import Conversation
from minisgl.tokenizer import Tokenizer


class TextService:
    """A tokenizer of its own in a thread of its own: tokenizers change while they work, so none is shared.

    Args:
        path: directory of the checkpoint. It is read when the first text comes.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minisgl-text")

    async def tokenize(self, prompt: str | Conversation) -> list[int]:
        """Token ids, with those that the tokenizer or the template adds.

        Raises:
            InvalidRequest: the prompt is malformed, or the template rejects it.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._encode, prompt)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Text, special tokens left out.

        Raises:
            InvalidRequest: an id is outside of the vocabulary.
        """
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._decode, token_ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._path)

    def _encode(self, prompt: str | Conversation) -> list[int]:
        if isinstance(prompt, Conversation):
            return self._tokenizer.encode_chat(prompt.messages, tools=prompt.tools)
        return self._tokenizer.encode(prompt)

    def _decode(self, token_ids: Sequence[int]) -> str:
        check_token_ids("tokens", token_ids, self._tokenizer.vocab_size, limit=len(token_ids))
        return self._tokenizer.decode(token_ids)
