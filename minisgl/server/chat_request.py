"""The body of ``/v1/chat/completions``."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Annotated, Any, Literal

import msgspec
from pydantic import AfterValidator, BeforeValidator, StrictBool, StrictStr

from minisgl.errors import InvalidRequest, short_repr
from minisgl.server.messages import Conversation
from minisgl.server.requests import ApiObject, MaxTokens, NumLogprobs, OpenAIRequest, documented, only_default
from minisgl.server.tools import FORCED, CallReader, NamedChoice, Tool, ToolChoice, ToolSyntax, forced_call, offered


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(ApiObject):
    """A part of a message's content; only texts are supported."""

    place = "messages[].content[]"
    type: Literal["text"]
    text: StrictStr


class CalledFunction(ApiObject):
    """A function that was called; ``arguments`` is JSON text."""

    place = "messages[].tool_calls[].function"
    name: StrictStr
    arguments: StrictStr


class PastCall(ApiObject):
    """A tool call of an earlier answer."""

    place = "messages[].tool_calls[]"
    id: StrictStr
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ApiObject):
    """A message of a conversation. Content, a text or parts, is required unless there are tool calls.

    ``tool_calls`` belong to the role assistant, ``tool_call_id`` to the role tool; of other roles the ``name`` is left
    out, since chat templates have no place for it. A ``refusal`` stands in for the content that it took the place of,
    and ``reasoning_content`` is for templates that show it.
    """

    place = "messages[]"
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None
    refusal: StrictStr | None = None
    reasoning_content: StrictStr | None = None

    def for_template(self, field: str) -> dict[str, Any]:
        """The message as a chat template reads it: its parts joined, arguments as objects.

        Raises `InvalidRequest` for a key that the role does not have, or arguments that are no JSON object.
        """
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise InvalidRequest(f"{field}.{name}", f"is only allowed with role {role}, not with {self.role}")
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise InvalidRequest(f"{field}.content", "this field is required")
        text = "".join(part.text for part in self.content or ()) or self.refusal or ""
        message: dict[str, Any] = {"role": self.role, "content": text}
        if self.role == "assistant" and self.reasoning_content:
            message["reasoning_content"] = self.reasoning_content
        if self.role == "tool":
            message |= self.model_dump(include={"tool_call_id", "name"}, exclude_none=True)
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [_call(f"{field}.tool_calls[{index}]", call) for index, call in calls]
        return message


def _call(field: str, call: PastCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments or "{}")  # some clients send nothing where there are none
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field}.function.arguments", "must be the text of a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}


MAX_TEMPLATE_VARIABLES = 16_384  # bytes of them, in a message to the tokenizer
# Names that mean something to what renders a template; those of special tokens, such as ``eos_token``, do too.
SET_BY_SERVER = frozenset(
    {
        *("add_generation_prompt", "additional_special_tokens", "chat_template", "continue_final_message"),
        *("conversation", "conversations", "documents", "extra_special_tokens", "max_length", "messages", "padding"),
        *("return_assistant_tokens_mask", "return_dict", "return_tensors", "sanitize_control_tokens", "self"),
        *("tokenize", "tokenizer_kwargs", "tools", "truncation"),
    }
)


def _check_variables(variables: dict[str, Any]) -> dict[str, Any]:
    for name in variables:
        if not name.isidentifier():
            raise ValueError(f"{short_repr(name)} is no name of a variable")
        if name in SET_BY_SERVER or name.endswith("_token"):
            raise ValueError(f"{short_repr(name)} is set by the server; leave it out")
    try:
        size = len(msgspec.msgpack.encode(variables))
    except OverflowError as error:
        raise ValueError("has a number of more than 64 bits") from error
    if size > MAX_TEMPLATE_VARIABLES:
        raise ValueError(f"is {size} bytes, and at most {MAX_TEMPLATE_VARIABLES} are allowed; send less")
    return variables


TemplateVariables = Annotated[dict[str, Any], AfterValidator(_check_variables)]
"""What a client tells the chat template beside the messages, by name. A name that it does not read does nothing."""


class ChatRequest(OpenAIRequest):
    """Body of ``POST /v1/chat/completions``.

    With ``parallel_tool_calls: false``, the answer has one call at most. Routers send the last eight fields, which
    other servers have, at their defaults. Those about reasoning change nothing: it stays in the text, as the model
    writes it.
    """

    messages: Annotated[list[ChatMessage], documented(minItems=1)]
    max_tokens: MaxTokens | None = None
    max_completion_tokens: MaxTokens | None = None
    logprobs: StrictBool = False
    top_logprobs: NumLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: TemplateVariables | None = None
    modalities: list[Literal["text"]] | None = None
    add_generation_prompt: Annotated[bool, only_default(True)] = True
    continue_final_message: Annotated[bool, only_default(False)] = False
    no_stop_trim: Annotated[bool, only_default(False)] = False
    return_hidden_states: Annotated[bool, only_default(False)] = False
    skip_special_tokens: Annotated[bool, only_default(True)] = True
    include_reasoning: StrictBool = True
    separate_reasoning: StrictBool = True
    stream_reasoning: StrictBool = True

    @property
    def prompts(self) -> list[Conversation]:
        messages = [message.for_template(f"messages[{index}]") for index, message in enumerate(self.messages)]
        tools = [tool.for_template() for tool in self._offered]
        return [Conversation(messages, tools or None, self.chat_template_kwargs)]

    def own_params(self) -> dict[str, Any]:
        if self.max_completion_tokens is not None and self.max_tokens is not None:
            raise InvalidRequest("max_tokens", "means the same as max_completion_tokens; give one of them")
        if self.top_logprobs and not self.logprobs:
            raise InvalidRequest("top_logprobs", "is only allowed with logprobs: true")
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return {"max_tokens": limit, "logprobs": num_logprobs}

    def constraint(self) -> dict[str, str]:
        form = super().constraint()
        if not self._offered:
            return form
        if self._must_call:
            return forced_call(self._offered)
        if "regex" in form:
            raise InvalidRequest("response_format", "with tools, the answer may be a call, which no regex describes")
        return forced_call(self._offered, or_else=json.loads(form["json_schema"])) if form else {}

    def reader_maker(self, syntax: ToolSyntax | None) -> Callable[[], CallReader] | None:
        """Return what makes the reader of tool calls for each choice; None if there can be no calls.

        Raises `InvalidRequest` if the request has tools or earlier calls, and the model has no ``syntax`` for them.
        """
        if syntax is None and (self.tools or any(message.tool_calls for message in self.messages)):
            message = "this model's chat template does not show that it can call tools; see --tool-parser"
            raise InvalidRequest("tools" if self.tools else "messages", message)
        if syntax is None or not self._offered:
            return None
        names = frozenset(tool.function.name for tool in self._offered)
        has_form = self._must_call or "json_schema" in self.constraint()  # then the grammar is ours, for calls too
        return partial(CallReader, FORCED if has_form else syntax, names, several=self.parallel_tool_calls)

    def with_client_field(self, error: InvalidRequest) -> InvalidRequest:
        """The same error with OpenAI's name of the field."""
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
