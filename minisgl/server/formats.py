"""Writing answers: from the engine's updates to the JSON of each API."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from minisgl.request import TokenLogprobs
from minisgl.server.errors import ApiError, to_json
from minisgl.server.messages import Update
from minisgl.server.requests import UsageChunks
from minisgl.server.tools import CallReader, ToolCall
from minisgl.tokenizer import Tokenizer

Json = dict[str, Any]
LEAST_LOGPROB = -9999.0  # stands for minus infinity, which JSON cannot say


class Usage:
    """Counts the tokens of a job with ``n`` choices for each prompt."""

    def __init__(self, prompt_lens: Sequence[int], n: int) -> None:
        self.prompt_lens = prompt_lens
        self.prompt_tokens = sum(prompt_lens)
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.accepted_drafts = self.rejected_drafts = 0
        self._n = n

    def add(self, update: Update) -> None:
        """Count an update."""
        self.completion_tokens += len(update.token_ids)
        if update.finish_reason:
            self.accepted_drafts += update.drafts[0]
            self.rejected_drafts += update.drafts[1]
        if update.choice % self._n == 0:  # the other choices find in the cache what the first one computed
            self.cached_tokens += update.cached_tokens if update.finish_reason else 0

    def body(self) -> Json:
        """The counts in OpenAI's format."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted_drafts,
                "rejected_prediction_tokens": self.rejected_drafts,
            },
        }


class Format(ABC):
    """Writes the answer to one request, as one body or as the chunks of a stream.

    ``usage`` counts each update before it is written.
    """

    typed_events = False  # as in OpenAI's Responses API: each event has the name of its type, and none says [DONE]

    def __init__(self, usage: Usage) -> None:
        self._usage = usage

    @abstractmethod
    def whole(self, updates: Sequence[Update]) -> Json | list[Json]:
        """The body, from one finished update for each choice, in order."""

    def opening(self, num_choices: int) -> list[Json]:
        """Chunks before the first token."""
        return []

    @abstractmethod
    def chunks(self, update: Update) -> list[Json]:
        """An update as chunks: none if it has nothing to show."""

    def encoded(self, update: Update) -> list[bytes]:
        """The same in JSON."""
        return [to_json(chunk) for chunk in self.chunks(update)]

    def closing(self) -> list[Json]:
        """Chunks after the last token."""
        return []

    def failed(self, error: ApiError) -> Json:
        """The chunk that ends a stream with an error."""
        return error.body()


_MARK = uuid.uuid4().hex  # stands for the text of a chunk


class OpenAIFormat(Format):
    """What chat and completions share. ``usage_chunks`` says which chunks of a stream count the tokens."""

    whole_object: str
    chunk_object: str
    id_prefix: str

    def __init__(
        self, model: str, tokenizer: Tokenizer, usage: Usage, logprobs: bool, usage_chunks: UsageChunks
    ) -> None:
        super().__init__(usage)
        self._identity = {"id": f"{self.id_prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        self._tokenizer = tokenizer
        self._wants_logprobs = logprobs
        self._usage_chunks = usage_chunks
        self._around: dict[int, tuple[bytes, bytes]] = {}  # what is before and after the text of a chunk, by choice

    def whole(self, updates: Sequence[Update]) -> Json:
        choices = [self._choice(update) for update in updates]
        return {"object": self.whole_object, **self._identity, "choices": choices, "usage": self._usage.body()}

    def closing(self) -> list[Json]:
        if self._usage_chunks == "none":
            return []
        return [{"object": self.chunk_object, **self._identity, "choices": [], "usage": self._usage.body()}]

    @property
    def _only_text(self) -> bool:
        """Whether the chunks between the first and the last differ in their text alone."""
        return not self._wants_logprobs and self._usage_chunks != "all"

    def encoded(self, update: Update) -> list[bytes]:
        if update.finish_reason is not None or not self._only_text:
            return super().encoded(update)
        if not update.text:
            return []
        if (around := self._around.get(update.choice)) is None:
            (example,) = self.chunks(Update(0, update.choice, _MARK))
            before, _, after = to_json(example).partition(to_json(_MARK))
            around = self._around[update.choice] = before, after
        return [around[0] + to_json(update.text) + around[1]]

    def _chunk(self, choice: Json) -> Json:
        chunk = {"object": self.chunk_object, **self._identity, "choices": [choice]}
        if self._usage_chunks != "none":
            chunk["usage"] = self._usage.body() if self._usage_chunks == "all" else None
        return chunk

    @abstractmethod
    def _choice(self, update: Update) -> Json: ...

    def _text(self, token_id: int) -> str:
        return self._tokenizer.token_text(token_id)


class ChatFormat(OpenAIFormat):
    """Answers of ``/v1/chat/completions``. ``make_reader`` is None if the request can have no tool calls."""

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        usage: Usage,
        logprobs: bool,
        usage_chunks: UsageChunks,
        make_reader: Callable[[], CallReader] | None,
    ) -> None:
        super().__init__(model, tokenizer, usage, logprobs, usage_chunks)
        self._readers = None if make_reader is None else defaultdict[int, CallReader](make_reader)
        self._calls: Counter[int] = Counter()  # calls so far, by choice

    @property
    def _only_text(self) -> bool:
        return super()._only_text and self._readers is None

    def opening(self, num_choices: int) -> list[Json]:
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(num_choices)
        ]

    def chunks(self, update: Update) -> list[Json]:
        text, calls = self._read(update)
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        if not delta and not update.finish_reason and not (self._wants_logprobs and update.logprobs):
            return []
        return [self._chunk({"delta": delta, **self._common_fields(update)})]

    def _choice(self, update: Update) -> Json:
        text, calls = self._read(update)
        message: Json = {"role": "assistant", "content": text}
        if calls:
            without_index = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": without_index}
        return {"message": message, **self._common_fields(update)}

    def _read(self, update: Update) -> tuple[str, list[Json]]:
        """The text of an update without the calls in it, and the calls."""
        if self._readers is None:
            return update.text, []
        reader = self._readers[update.choice]
        pieces = reader.feed(update.text)
        if update.finish_reason:
            pieces += reader.finish()
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        return text, [self._call(update.choice, piece) for piece in pieces if isinstance(piece, ToolCall)]

    def _call(self, choice: int, call: ToolCall) -> Json:
        index = self._calls[choice]
        self._calls[choice] += 1
        function = {"name": call.name, "arguments": call.arguments}
        return {"index": index, "id": f"call_{uuid.uuid4().hex[:24]}", "type": "function", "function": function}

    def _common_fields(self, update: Update) -> Json:
        logprobs = {"content": [self._position(entry) for entry in update.logprobs]} if self._wants_logprobs else None
        reason = self._finish_reason(update)
        if reason == "stop" and self._calls[update.choice]:
            reason = "tool_calls"
        return {"index": update.choice, "logprobs": logprobs, "finish_reason": reason}

    def _finish_reason(self, update: Update) -> str | None:
        """The engine's reason, except that an answer whose one call has been read was not cut short."""
        reason = update.finish_reason
        whole = reason == "length" and self._readers is not None and self._readers[update.choice].complete
        return "stop" if whole else reason

    def _position(self, entry: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._text(token_id)
        octets = None if "\ufffd" in text else list(text.encode())  # part of a character: its bytes are not known here
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": octets}


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes back before its continuation."""

    text: str
    token_ids: Sequence[int] = ()  # empty without log-probabilities
    logprobs: Sequence[TokenLogprobs] = ()  # of all tokens but the first


class CompletionFormat(OpenAIFormat):
    """Answers of ``/v1/completions``. ``echoes`` has what comes before the text of each choice, or is empty."""

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        usage: Usage,
        logprobs: bool,
        usage_chunks: UsageChunks,
        echoes: Sequence[Echo],
    ) -> None:
        super().__init__(model, tokenizer, usage, logprobs, usage_chunks)
        self._echoes = echoes
        self._offsets: Counter[int] = Counter()  # characters so far, by choice

    def opening(self, num_choices: int) -> list[Json]:
        return [
            self._chunk(self._body(index, echo.text, self._echoed(index), None))
            for index, echo in enumerate(self._echoes)
        ]

    def chunks(self, update: Update) -> list[Json]:
        if not update.text and not update.finish_reason and not (self._wants_logprobs and update.logprobs):
            return []
        return [self._chunk(self._body(update.choice, update.text, self._logprobs(update), update.finish_reason))]

    def _choice(self, update: Update) -> Json:
        if not self._echoes:
            return self._body(update.choice, update.text, self._logprobs(update), update.finish_reason)
        echoed, continued = self._echoed(update.choice), self._logprobs(update)
        if echoed is not None and continued is not None:
            echoed = {name: echoed[name] + continued[name] for name in echoed}
        return self._body(update.choice, self._echoes[update.choice].text + update.text, echoed, update.finish_reason)

    def _body(self, choice: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echoed(self, choice: int) -> Json | None:
        if not self._wants_logprobs:
            return None
        echo = self._echoes[choice]
        first = self._text(echo.token_ids[0])
        self._offsets[choice] = len(first)
        rest = self._positions(choice, echo.logprobs)
        start = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        return {name: start[name] + rest[name] for name in rest}

    def _logprobs(self, update: Update) -> Json | None:
        return self._positions(update.choice, update.logprobs) if self._wants_logprobs else None

    def _positions(self, choice: int, entries: Sequence[TokenLogprobs]) -> Json:
        tokens, offsets, top = [], [], []
        for entry in entries:
            tokens.append(self._text(entry.token_id))
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(tokens[-1])
            likely: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                likely.setdefault(self._text(token_id), max(logprob, LEAST_LOGPROB))
            top.append(likely)
        values = [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}


@dataclass(frozen=True, slots=True)
class ScoreFormat:
    """How ``/generate`` writes log-probabilities: a list of log-probability, token id and text for each token."""

    prompts: Sequence[Echo]  # of each prompt, the tokens from ``logprob_start_len`` on; the first has no number
    with_top: bool
    text: Callable[[int], str | None]  # of a token; None where no text is wanted

    def fields(self, prompt: int, update: Update) -> Json:
        """The fields of ``meta_info`` for a choice of the prompt with the index ``prompt``."""
        echo = self.prompts[prompt]
        start = echo.token_ids[:1]
        given, written = [self._top(entry) for entry in echo.logprobs], [self._top(entry) for entry in update.logprobs]
        fields: Json = {
            "input_token_logprobs": [[None, token, self.text(token)] for token in start] + self._chosen(echo.logprobs),
            "output_token_logprobs": self._chosen(update.logprobs),
        }
        if self.with_top:
            fields |= {"input_top_logprobs": [None] * len(start) + given, "output_top_logprobs": written}
        return fields

    def _chosen(self, entries: Sequence[TokenLogprobs]) -> list[Any]:
        return [self._token(entry.token_id, entry.logprob) for entry in entries]

    def _top(self, entry: TokenLogprobs) -> list[Any]:
        return [self._token(token_id, logprob) for token_id, logprob in entry.top]

    def _token(self, token_id: int, logprob: float) -> list[Any]:
        return [max(logprob, LEAST_LOGPROB), token_id, self.text(token_id)]


class GenerateFormat(Format):
    """Answers of ``/generate``: text, token ids and counts of each choice, as a list if there are ``several``."""

    def __init__(self, usage: Usage, n: int, several: bool, scores: ScoreFormat | None) -> None:
        super().__init__(usage)
        self._id = uuid.uuid4().hex
        self._n = n
        self._several = several
        self._scores = scores
        self._so_far: dict[int, Update] = {}

    def whole(self, updates: Sequence[Update]) -> Json | list[Json]:
        bodies = [self._body(update) for update in updates]
        return bodies if self._several else bodies[0]

    def chunks(self, update: Update) -> list[Json]:
        so_far = self._so_far.setdefault(update.choice, update)
        if so_far is not update:
            so_far.merge(update)
        if not update.text and not update.finish_reason:
            return []
        return [{**self._body(so_far), "index": update.choice}]

    def _body(self, update: Update) -> Json:
        reason: Json | None = None if update.finish_reason is None else {"type": update.finish_reason}
        if reason is not None and update.finish_reason == "length":
            reason["length"] = len(update.token_ids)
        prompt = update.choice // self._n
        meta = {
            "id": f"{self._id}-{update.choice}",
            "finish_reason": reason,
            "prompt_tokens": self._usage.prompt_lens[prompt],
            "completion_tokens": len(update.token_ids),
            "cached_tokens": update.cached_tokens,
            **({} if self._scores is None else self._scores.fields(prompt, update)),
        }
        return {"text": update.text, "output_ids": update.token_ids, "meta_info": meta}
