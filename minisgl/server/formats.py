"""The bodies that the endpoints answer with: whole, and in chunks."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Any

from minisgl.core.request import TokenLogprobs
from minisgl.messages import Update
from minisgl.tokenizer import Tokenizer

Json = dict[str, Any]

_LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON cannot say."""


class Usage:
    """Counts the tokens of a job.

    Args:
        prompt_lens: tokens of each prompt.
        n: choices a prompt. The first one's cached tokens are the prompt's: the others find what the first computed.
    """

    def __init__(self, prompt_lens: Sequence[int], n: int) -> None:
        self._prompt_tokens = sum(prompt_lens)
        self._n = n
        self._completion_tokens = 0
        self._cached_tokens = 0

    def add(self, update: Update) -> None:
        """Count an update."""
        self._completion_tokens += len(update.token_ids)
        if update.choice % self._n == 0:
            self._cached_tokens += update.cached_tokens if update.finish_reason else 0

    def body(self) -> Json:
        """As the API shows it."""
        return {
            "prompt_tokens": self._prompt_tokens,
            "completion_tokens": self._completion_tokens,
            "total_tokens": self._prompt_tokens + self._completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }


class Format(ABC):
    """Writes the answer to one request.

    Args:
        model: the model's name.
        tokenizer: turns the ids of log-probabilities into text.
        logprobs: whether they were asked for.
        null_usage: whether every chunk has a ``usage``, null but in the last.
    """

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, null_usage: bool = False) -> None:
        self._identity = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs
        self._null_usage: Json = {"usage": None} if null_usage else {}

    def whole(self, updates: Sequence[Update], usage: Usage) -> Json:
        """A body with one finished update a choice."""
        choices = [self._choice(update) for update in sorted(updates, key=lambda update: update.choice)]
        return {"object": self.whole_object, **self._identity, "choices": choices, "usage": usage.body()}

    def opening(self, num_choices: int) -> list[Json]:
        """Chunks that come before the first token."""
        return []

    def chunk(self, update: Update) -> Json | None:
        """An update as a chunk, or None if it has nothing that a client could see."""
        if not update.text and not update.finish_reason and not (self._wants_logprobs and update.logprobs):
            return None
        return self._chunk(self._chunk_choice(update))

    def usage_chunk(self, usage: Usage) -> Json:
        """The chunk after the last."""
        return {"object": self.chunk_object, **self._identity, "choices": [], "usage": usage.body()}

    def _chunk(self, choice: Json) -> Json:
        return {"object": self.chunk_object, **self._identity, "choices": [choice], **self._null_usage}

    @abstractmethod
    def _choice(self, update: Update) -> Json: ...

    @abstractmethod
    def _chunk_choice(self, update: Update) -> Json: ...

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


class ChatFormat(Format):
    """``chat.completion`` and ``chat.completion.chunk``."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def opening(self, num_choices: int) -> list[Json]:
        """One chunk a choice that says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(num_choices)
        ]

    def _choice(self, update: Update) -> Json:
        return {"message": {"role": "assistant", "content": update.text}, **self._rest(update)}

    def _chunk_choice(self, update: Update) -> Json:
        return {"delta": {"content": update.text} if update.text else {}, **self._rest(update)}

    def _rest(self, update: Update) -> Json:
        logprobs = {"content": [self._position(entry) for entry in update.logprobs]} if self._wants_logprobs else None
        return {"index": update.choice, "logprobs": logprobs, "finish_reason": update.finish_reason}

    def _position(self, entry: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._text(token_id)
        # A token that is a part of a character has no text, and its bytes are not known here.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": octets}


class CompletionFormat(Format):
    """``text_completion``, whole or in chunks."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(self, model: str, tokenizer: Tokenizer, logprobs: bool, null_usage: bool = False) -> None:
        super().__init__(model, tokenizer, logprobs, null_usage)
        self._offsets: Counter[int] = Counter()
        """Characters so far, by choice."""

    def _choice(self, update: Update) -> Json:
        logprobs = self._logprobs(update) if self._wants_logprobs else None
        return {
            "index": update.choice,
            "text": update.text,
            "logprobs": logprobs,
            "finish_reason": update.finish_reason,
        }

    def _chunk_choice(self, update: Update) -> Json:
        return self._choice(update)

    def _logprobs(self, update: Update) -> Json:
        tokens, offsets, top = [], [], []
        for entry in update.logprobs:
            tokens.append(self._text(entry.token_id))
            offsets.append(self._offsets[update.choice])
            self._offsets[update.choice] += len(tokens[-1])
            likely: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                likely.setdefault(self._text(token_id), max(logprob, _LEAST_LOGPROB))
            top.append(likely)
        values = [max(entry.logprob, _LEAST_LOGPROB) for entry in update.logprobs]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
