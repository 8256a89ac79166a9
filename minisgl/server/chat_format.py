"""``chat.completion`` and ``chat.completion.chunk``."""

from __future__ import annotations

import uuid
from collections import Counter, defaultdict
from collections.abc import Callable

from minisgl.core.request import TokenLogprobs
from minisgl.messages import Update
from minisgl.server.formats import LEAST_LOGPROB, Json, OpenAIFormat
from minisgl.server.tool_parsers import CallReader, ToolCall
from minisgl.tokenizer import Tokenizer


class ChatFormat(OpenAIFormat):
    """Answers of an assistant, who may call tools.

    Args:
        model, tokenizer, logprobs, show_usage: see `OpenAIFormat`.
        make_reader: makes what finds the calls in one choice's text; None where there can be none.
    """

    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    id_prefix = "chatcmpl"

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        logprobs: bool,
        show_usage: bool,
        make_reader: Callable[[], CallReader] | None,
    ) -> None:
        super().__init__(model, tokenizer, logprobs, show_usage)
        self._readers = None if make_reader is None else defaultdict[int, CallReader](make_reader)
        self._calls: Counter[int] = Counter()
        """Calls so far, by choice."""

    def opening(self, num_choices: int) -> list[Json]:
        """One chunk a choice that says whose turn it is."""
        delta = {"role": "assistant", "content": ""}
        return [
            self._chunk({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
            for index in range(num_choices)
        ]

    def chunk(self, update: Update) -> Json | None:
        """Text and calls that are certain by now."""
        text, calls = self._read(update)
        delta: Json = {"content": text} if text else {}
        if calls:
            delta["tool_calls"] = calls
        if not delta and not update.finish_reason and not (self._wants_logprobs and update.logprobs):
            return None
        return self._chunk({"delta": delta, **self._rest(update)})

    def _choice(self, update: Update) -> Json:
        text, calls = self._read(update)
        message: Json = {"role": "assistant", "content": text}
        if calls:
            without_index = [{name: value for name, value in call.items() if name != "index"} for call in calls]
            message |= {"content": text or None, "tool_calls": without_index}
        return {"message": message, **self._rest(update)}

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

    def _rest(self, update: Update) -> Json:
        logprobs = {"content": [self._position(entry) for entry in update.logprobs]} if self._wants_logprobs else None
        reason = update.finish_reason
        if reason == "stop" and self._calls[update.choice]:
            reason = "tool_calls"
        return {"index": update.choice, "logprobs": logprobs, "finish_reason": reason}

    def _position(self, entry: TokenLogprobs) -> Json:
        top = [self._token(token_id, logprob) for token_id, logprob in entry.top]
        return {**self._token(entry.token_id, entry.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> Json:
        text = self._text(token_id)
        # A token that is a part of a character has no text, and its bytes are not known here.
        octets = None if "\ufffd" in text else list(text.encode())
        return {"token": text, "logprob": max(logprob, LEAST_LOGPROB), "bytes": octets}
