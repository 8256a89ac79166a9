"""The body of ``POST /v1/chat/completions``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Annotated, Literal

from pydantic import StrictBool

from minisgl.errors import InvalidRequest
from minisgl.messages import Conversation
from minisgl.server.conversation import ChatMessage
from minisgl.server.requests import Count, GenerationRequest, NumLogprobs, shown
from minisgl.server.response_format import ResponseFormat
from minisgl.server.tool_choice import NamedChoice, Tool, ToolChoice, forced_call, offered
from minisgl.server.tool_parsers import FORCED, CallReader, ToolSyntax


class ChatRequest(GenerationRequest):
    """Body of ``POST /v1/chat/completions``."""

    messages: Annotated[list[ChatMessage], shown(minItems=1)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: StrictBool = False
    top_logprobs: NumLogprobs | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], shown(minItems=1)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True
    modalities: list[Literal["text"]] | None = None

    @property
    def prompts(self) -> list[Conversation]:
        """One conversation, and the functions among which the model may choose."""
        messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(self.messages)]
        tools = [tool.for_template() for tool in self._offered]
        return [Conversation(messages, tools or None)]

    @property
    def num_logprobs(self) -> int | None:
        """The count is in ``top_logprobs``."""
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def limit(self) -> int | None:
        """By its new name or its old one; neither means the rest of the context."""
        if self.max_completion_tokens is None:
            return self.max_tokens
        if self.max_tokens is not None:
            raise InvalidRequest("max_tokens", "means the same as max_completion_tokens; give one of them")
        return self.max_completion_tokens

    def constraint(self) -> dict[str, str]:
        """Of a call that must be made, or of ``response_format``."""
        form = {} if self.response_format is None else self.response_format.constraint()
        if not self._offered:
            return form
        if form:
            raise InvalidRequest("response_format", "with tools, the answer may be a call, which has another form")
        if self._must_call:
            return forced_call(self._offered)
        if not self.parallel_tool_calls:
            raise InvalidRequest("parallel_tool_calls", "false is only allowed where tool_choice demands a call")
        if any(tool.function.strict for tool in self._offered):
            raise InvalidRequest("tools", "strict is only allowed where tool_choice demands a call")
        return {}

    def reader_maker(self, syntax: ToolSyntax | None) -> Callable[[], CallReader] | None:
        """Makes what finds the calls in one choice's text; None where there can be none.

        Args:
            syntax: of the model; None if it cannot call tools.

        Raises:
            InvalidRequest: the request has tools, or earlier calls of tools, and the model cannot.
        """
        if syntax is None and (self.tools or any(message.tool_calls for message in self.messages)):
            message = "this model's chat template does not show that it can call tools; see --tool-parser"
            raise InvalidRequest("tools" if self.tools else "messages", message)
        if syntax is None or not self._offered:
            return None
        names = frozenset(tool.function.name for tool in self._offered)
        return partial(CallReader, FORCED if self._must_call else syntax, names)

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """Messages are the engine's prompt, and some more fields have other names."""
        form = "tool_choice" if self._must_call else "response_format"
        names = {"prompt": "messages", "logprobs": "top_logprobs", "json_schema": form, "regex": form}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return type(error)(names.get(error.field, error.field), error.message)

    @property
    def _offered(self) -> list[Tool]:
        return offered(self.tools, self.tool_choice)

    @property
    def _must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedChoice)
