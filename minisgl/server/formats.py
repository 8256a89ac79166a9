"""The bodies that the endpoints answer with: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from minisgl.messages import Update
from minisgl.tokenizer import Tokenizer

Json = dict[str, Any]

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Usage:
    """Counts the tokens of a job.

    Args:
        prompt_lens: tokens of each prompt.
        n: choices a prompt. The first one's cached tokens are the prompt's: the others find what the first computed.
    """

    def __init__(self, prompt_lens: Sequence[int], n: int) -> None:
        self.prompt_tokens = sum(prompt_lens)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self._n = n

    def add(self, update: Update) -> None:
        """Count an update."""
        self.completion_tokens += len(update.token_ids)
        if update.choice % self._n == 0:
            self.cached_tokens += update.cached_tokens if update.finish_reason else 0

    def body(self) -> Json:
        """As the API shows it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Format(ABC):
    """Writes the answer to one request."""

    @abstractmethod
    def whole(self, updates: Sequence[Update], usage: Usage) -> Json | list[Json]:
        """A body with one finished update a choice, in the order of the choices."""

    @abstractmethod
    def opening(self, num_choices: int) -> list[Json]:
        """Chunks that come before the first token."""

    @abstractmethod
    def chunk(self, update: Update) -> Json | None:
        """An update as a chunk, or None if it has nothing that a client could see."""

    @abstractmethod
    def closing(self, usage: Usage) -> list[Json]:
        """Chunks that come after the last token."""


class OpenAIFormat(Format):
    """What OpenAI's two formats share.

    Args:
        model: the model's name.
        tokenizer: turns the ids of log-probabilities into text.
        logprobs: whether they were asked for.
        show_usage: whether a last chunk counts the tokens; all others have a ``usage`` of null then.
    """

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, show_usage: bool) -> None:
        self._identity = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs
        self._null_usage: Json = {"usage": None} if show_usage else {}

    def whole(self, updates: Sequence[Update], usage: Usage) -> Json:
        """See `Format`, as for all that follow."""
        choices = [self._choice(update) for update in updates]
        return {"object": self.whole_object, **self._identity, "choices": choices, "usage": usage.body()}

    def closing(self, usage: Usage) -> list[Json]:
        """A chunk without a choice, if the usage is wanted."""
        if not self._null_usage:
            return []
        return [{"object": self.chunk_object, **self._identity, "choices": [], "usage": usage.body()}]

    def _chunk(self, choice: Json) -> Json:
        return {"object": self.chunk_object, **self._identity, "choices": [choice], **self._null_usage}

    @abstractmethod
    def _choice(self, update: Update) -> Json: ...

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)
