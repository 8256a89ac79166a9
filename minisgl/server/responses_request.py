"""The body of ``/v1/responses``, OpenAI's newer API, as the body of a chat completion that means the same."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PlainValidator, StrictBool, StrictStr, ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.chat_request import ChatRequest, TemplateVariables
from minisgl.server.requests import (
    ApiObject,
    EngineRequest,
    MaxTokens,
    NumLogprobs,
    SamplingFields,
    Seed,
    Timeout,
    only_default,
)
from minisgl.server.tools import FunctionName

_SAME_IN_CHATS = {"model", "stream", "seed", "user", "timeout", "parallel_tool_calls", "chat_template_kwargs"}
_LOGPROBS = "message.output_text.logprobs"  # the one of ``include`` that is about text


class InputPart(ApiObject):
    """A text of an item: the client's, or of an answer of before."""

    place = "input[].content[]"
    type: Literal["input_text", "output_text", "refusal"]
    text: StrictStr | None = None
    refusal: StrictStr | None = None
    annotations: list[Any] | None = None
    logprobs: list[Any] | None = None


def _as_parts(value: Any) -> Any:
    return [{"type": "input_text", "text": value}] if isinstance(value, str) else value


_Parts = Annotated[list[InputPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[InputPart])]


class InputItem(ApiObject):
    """A message, a call of a function, or its result. ``id``, ``status`` and ``phase`` change nothing."""

    place = "input[]"
    type: Literal["message", "function_call", "function_call_output"] = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: _Parts = None
    call_id: StrictStr | None = None
    name: StrictStr | None = None
    arguments: StrictStr | None = None
    output: _Parts = None
    id: StrictStr | None = None
    status: StrictStr | None = None
    phase: StrictStr | None = None

    def required(self, field: str, *names: str) -> None:
        """Raise `InvalidRequest` if one of the fields that its type needs is missing."""
        for name in names:
            if getattr(self, name) is None:
                raise InvalidRequest(f"{field}.{name}", f"this field is required with type {self.type}")


class ResponseTool(ApiObject):
    """A function that the client can call."""

    place = "tools[]"
    type: Literal["function"]
    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class ChosenFunction(ApiObject):
    """The function that must be called."""

    place = "tool_choice"
    type: Literal["function"]
    name: FunctionName


def _as_choice(value: Any) -> str | ChosenFunction:
    if value in ("none", "auto", "required"):
        return str(value)
    try:
        return ChosenFunction.model_validate(value)
    except ValidationError as error:
        raise ValueError('must be none, auto, required, or {"type": "function", "name": "…"}') from error


class TextFormat(ApiObject):
    """The form of the answer's text. A schema is always strict; ``strict``, name and description change nothing."""

    place = "text.format"
    type: Literal["text", "json_object", "json_schema"]
    name: StrictStr = "answer"
    description: StrictStr | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None

    def shown(self) -> dict[str, Any]:
        """As the answer repeats it."""
        return {"type": self.type} if self.type != "json_schema" else self.model_dump(by_alias=True)


class TextOptions(ApiObject):
    """Options of the answer's text."""

    place = "text"
    format: TextFormat | None = None


class ResponsesRequest(SamplingFields):
    """Body of ``POST /v1/responses``. Nothing is stored, so a conversation is sent whole; ``store`` changes nothing."""

    model: StrictStr
    input: Annotated[
        list[InputItem],
        BeforeValidator(
            lambda value: [{"role": "user", "content": value}] if isinstance(value, str) else value,
            json_schema_input_type=str | list[InputItem],
        ),
    ]
    instructions: StrictStr | None = None
    max_output_tokens: MaxTokens | None = None
    stream: StrictBool = False
    tools: list[ResponseTool] | None = None
    tool_choice: Annotated[
        Literal["none", "auto", "required"] | ChosenFunction | None,
        PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | ChosenFunction),
    ] = None
    parallel_tool_calls: StrictBool = True
    chat_template_kwargs: TemplateVariables | None = None
    text: TextOptions | None = None
    top_logprobs: NumLogprobs | None = None
    include: list[StrictStr] | None = None
    seed: Seed | None = None
    user: StrictStr | None = None
    timeout: Timeout | None = None
    metadata: dict[str, Any] | None = None
    n: Annotated[int, only_default(1)] = 1
    store: StrictBool = False
    background: Annotated[bool, only_default(False)] = False
    truncation: Annotated[str, only_default("disabled")] = "disabled"
    service_tier: Literal["auto", "default", "flex", "priority", "scale"] = "auto"

    def as_chat(self) -> ChatRequest:
        """The chat completion that means the same. Raises `InvalidRequest` for items that lack something."""
        fields = self.model_dump(
            include={*SamplingFields.model_fields, *_SAME_IN_CHATS},
            exclude_unset=True,
        )
        fields |= {"messages": self._messages(), "max_completion_tokens": self.max_output_tokens}
        if self.wants_logprobs:
            fields |= {"logprobs": True, "top_logprobs": self.top_logprobs}
        if self.text is not None and self.text.format is not None:
            fields["response_format"] = _chat_form(self.text.format)
        if self.tools:
            about = [tool.model_dump(exclude={"type"}, exclude_none=True) for tool in self.tools]
            fields["tools"] = [{"type": "function", "function": function} for function in about]
        choice = self.tool_choice
        if isinstance(choice, ChosenFunction):
            fields["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
        elif choice is not None:
            fields["tool_choice"] = choice
        return ChatRequest.model_validate(fields)

    @property
    def wants_logprobs(self) -> bool:
        """Whether the answer has log-probabilities."""
        return self.top_logprobs is not None or _LOGPROBS in (self.include or ())

    def engine_request(self) -> EngineRequest:
        """The request for the engine. Raises `InvalidRequest`."""
        return self.as_chat().engine_request()

    def with_client_field(self, error: InvalidRequest) -> InvalidRequest:
        """The same error with the name that the field has here."""
        name = self.as_chat().with_client_field(error).field
        names = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format", "prompt": "input"}
        name = "input" if name.startswith("messages") else names.get(name, name)
        return type(error)(name, error.message)

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions is not None:
            messages.append({"role": "system", "content": self.instructions})
        for index, item in enumerate(self.input):
            field = f"input[{index}]"
            match item.type:
                case "message":
                    item.required(field, "role", "content")
                    messages.append({"role": item.role, "content": _text(f"{field}.content", item.content)})
                case "function_call":
                    item.required(field, "call_id", "name", "arguments")
                    function = {"name": item.name, "arguments": item.arguments}
                    if not messages or messages[-1]["role"] != "assistant":
                        messages.append({"role": "assistant"})
                    calls = messages[-1].setdefault("tool_calls", [])
                    calls.append({"id": item.call_id, "type": "function", "function": function})
                case "function_call_output":
                    item.required(field, "call_id", "output")
                    text = _text(f"{field}.output", item.output)
                    messages.append({"role": "tool", "tool_call_id": item.call_id, "content": text})
        return messages


def _text(field: str, parts: list[InputPart] | None) -> str:
    texts = [part.refusal if part.type == "refusal" else part.text for part in parts or ()]
    for index, text in enumerate(texts):
        if text is None:
            raise InvalidRequest(f"{field}[{index}].text", "this field is required")
    return "".join(map(str, texts))


def _chat_form(form: TextFormat) -> dict[str, Any]:
    if form.type != "json_schema":
        return {"type": form.type}
    if form.json_schema is None:
        raise InvalidRequest("text.format.schema", "is required with type json_schema")
    return {"type": form.type, "json_schema": {"name": form.name, "schema": form.json_schema}}
