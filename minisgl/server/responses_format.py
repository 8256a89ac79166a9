"""Answers of ``/v1/responses``: a list of items, each a message or a call; as a stream, typed events that build it."""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from minisgl.server.errors import ApiError, to_json
from minisgl.server.formats import ChatFormat, Json, Usage
from minisgl.server.messages import Update
from minisgl.server.responses_request import ResponsesRequest
from minisgl.server.tools import CallReader
from minisgl.tokenizer import Tokenizer


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"


class ResponsesFormat(ChatFormat):
    """Answers of ``/v1/responses`` to the request ``body``, which has one choice."""

    typed_events = True

    def __init__(
        self,
        body: ResponsesRequest,
        model: str,
        tokenizer: Tokenizer,
        usage: Usage,
        make_reader: Callable[[], CallReader] | None,
    ) -> None:
        super().__init__(model, tokenizer, usage, body.wants_logprobs, "none", make_reader)
        self._about = {"id": _new_id("resp"), "object": "response", "created_at": int(time.time())}
        self._settings = _settings(body, model)
        self._output: list[Json] = []
        self._message: Json | None = None  # the item that is being written
        self._numbers = itertools.count()

    def whole(self, updates: Sequence[Update]) -> Json:
        (update,) = updates
        self.chunks(update)
        reason = self._finish_reason(update)
        return self._response(_status(reason), reason)

    def opening(self, num_choices: int) -> list[Json]:
        return [
            self._event(f"response.{name}", response=self._response("in_progress"))
            for name in ("created", "in_progress")
        ]

    def chunks(self, update: Update) -> list[Json]:
        return list(self._events(update))

    def encoded(self, update: Update) -> list[bytes]:
        return [to_json(chunk) for chunk in self.chunks(update)]

    def failed(self, error: ApiError) -> Json:
        response = self._response("failed")
        response["error"] = {"code": "server_error", "message": error.detail}
        return self._event("response.failed", response=response)

    def _events(self, update: Update) -> Iterator[Json]:
        text, calls = self._read(update)
        entries = [self._position(entry) for entry in update.logprobs] if self._wants_logprobs else []
        if text or entries:
            yield from self._write(text, entries)
        for call in calls:
            yield from self._close("completed")
            yield from self._call_item(call)
        if update.finish_reason is None:
            return
        if not self._output and self._message is None:
            yield from self._write("", [])
        status = _status(reason := self._finish_reason(update))
        yield from self._close(status)
        yield self._event(f"response.{status}", response=self._response(status, reason))

    def _write(self, text: str, entries: list[Json]) -> Iterator[Json]:
        """Continue the message, or begin one."""
        if self._message is None:
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            self._message = {
                "type": "message",
                "id": _new_id("msg"),
                "status": "in_progress",
                "role": "assistant",
                "content": [part],
            }
            yield self._item_event("added", {**self._message, "content": []})
            yield self._part_event("content_part.added", part=dict(part))
        (part,) = self._message["content"]
        part["text"] += text
        part["logprobs"] += entries
        if text:
            yield self._part_event("output_text.delta", delta=text, logprobs=entries)

    def _close(self, status: str) -> Iterator[Json]:
        """End the message, if one is being written."""
        if self._message is None:
            return
        (part,) = self._message["content"]
        yield self._part_event("output_text.done", text=part["text"], logprobs=part["logprobs"])
        yield self._part_event("content_part.done", part=part)
        yield self._finish({**self._message, "status": status})
        self._message = None

    def _call_item(self, call: Json) -> Iterator[Json]:
        function = call["function"]
        item = {"type": "function_call", "id": _new_id("fc"), "call_id": call["id"], **function, "status": "completed"}
        place = {"item_id": item["id"], "output_index": len(self._output)}
        yield self._item_event("added", {**item, "arguments": "", "status": "in_progress"})
        yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
        name = {"name": item["name"]}
        yield self._event("response.function_call_arguments.done", **place, **name, arguments=item["arguments"])
        yield self._finish(item)

    def _finish(self, item: Json) -> Json:
        event = self._item_event("done", item)
        self._output.append(item)
        return event

    def _item_event(self, name: str, item: Json) -> Json:
        return self._event(f"response.output_item.{name}", output_index=len(self._output), item=item)

    def _part_event(self, name: str, **fields: Any) -> Json:
        assert self._message is not None
        place = {"item_id": self._message["id"], "output_index": len(self._output), "content_index": 0}
        return self._event(f"response.{name}", **place, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        return {"type": kind, "sequence_number": next(self._numbers), **fields}

    def _response(self, status: str, finish_reason: str | None = None) -> Json:
        details = {"reason": "max_output_tokens"} if finish_reason == "length" else None
        usage = None if status == "in_progress" else _usage_body(self._usage)
        end = {"status": status, "error": None, "incomplete_details": details, "usage": usage}
        return {**self._about, **self._settings, "output": list(self._output), **end}


def _status(finish_reason: str | None) -> str:
    return "completed" if finish_reason == "stop" else "incomplete"


def _usage_body(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


def _settings(body: ResponsesRequest, model: str) -> Json:
    """What the answer repeats of the request."""
    form = {"type": "text"} if body.text is None or body.text.format is None else body.text.format.shown()
    choice = body.tool_choice or "auto"
    return {
        "model": model,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "text": {"format": form},
        "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "user": body.user,
    }
