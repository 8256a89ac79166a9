"""Messages of a chat, as the API takes them and as chat templates read them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, StrictStr

from minisgl.errors import InvalidRequest
from minisgl.server.requests import ApiObject


def _as_parts(value: Any) -> Any:
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class TextPart(ApiObject):
    """A piece of a message. Other kinds of parts are not supported."""

    type: Literal["text"]
    text: StrictStr


class CalledFunction(ApiObject):
    """Which function was called; ``arguments`` is JSON text."""

    name: StrictStr
    arguments: StrictStr


class PastCall(ApiObject):
    """A call that an earlier answer has made."""

    id: StrictStr
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(ApiObject):
    """A message of a conversation; a text is the same as one part.

    ``tool_calls`` are an assistant's, ``tool_call_id`` and ``name`` a tool's. Content is required but beside calls.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        list[TextPart] | None, BeforeValidator(_as_parts, json_schema_input_type=str | list[TextPart] | None)
    ] = None
    tool_calls: list[PastCall] | None = None
    tool_call_id: StrictStr | None = None
    name: StrictStr | None = None

    def for_template(self, field: str) -> dict[str, Any]:
        """The message as a chat template reads it: its parts joined, arguments as objects.

        Args:
            field: where the message is, for errors.

        Raises:
            InvalidRequest: a key does not go with the role, or arguments are no JSON object.
        """
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool"), ("name", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise InvalidRequest(f"{field}.{name}", f"is only allowed with role {role}, not with {self.role}")
        if self.content is None and not self.tool_calls:
            raise InvalidRequest(f"{field}.content", "this field is required")
        message: dict[str, Any] = {"role": self.role, "content": "".join(part.text for part in self.content or ())}
        message |= self.model_dump(include={"tool_call_id", "name"}, exclude_none=True)
        if self.tool_calls:
            calls = enumerate(self.tool_calls)
            message["tool_calls"] = [_call(f"{field}.tool_calls[{index}]", call) for index, call in calls]
        return message


def _call(field: str, call: PastCall) -> dict[str, Any]:
    try:
        arguments = json.loads(call.function.arguments)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{field}.function.arguments", "must be the text of a JSON object")
    return {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}}
