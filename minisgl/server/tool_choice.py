"""``tools`` and ``tool_choice``: which functions a model is told of, and which it must call."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import PlainValidator, StrictBool, StrictStr, StringConstraints, ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.requests import ApiObject

_NAME = r"^[a-zA-Z0-9_.-]{1,64}$"

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}

FunctionName = Annotated[StrictStr, StringConstraints(pattern=_NAME)]


class Function(ApiObject):
    """What a model is told of a function. ``parameters`` is a JSON schema; none means no parameters."""

    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(ApiObject):
    """A function that the client can call."""

    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """As chat templates expect it; ``strict`` is nothing to tell the model."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": function}


class FunctionChoice(ApiObject):
    """The name of a function."""

    name: FunctionName


class NamedChoice(ApiObject):
    """The function that must be called."""

    type: Literal["function"]
    function: FunctionChoice


def _as_choice(value: Any) -> str | NamedChoice:
    if value in ("none", "auto", "required"):
        return str(value)
    try:
        return NamedChoice.model_validate(value)
    except ValidationError as error:
        form = '{"type": "function", "function": {"name": "…"}}'
        raise ValueError(f"must be none, auto, required, or {form}") from error


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedChoice,
    PlainValidator(_as_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice),
]


def offered(tools: list[Tool] | None, choice: str | NamedChoice | None) -> list[Tool]:
    """The functions among which the model may choose.

    Raises:
        InvalidRequest: the choice needs functions that are not there, or one is there twice.
    """
    if tools is None:
        if choice not in (None, "none"):
            raise InvalidRequest("tool_choice", "is only allowed with tools")
        return []
    names = [tool.function.name for tool in tools]
    if not names:
        raise InvalidRequest("tools", "must hold at least one function")
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "names a function twice")
    if not isinstance(choice, NamedChoice):
        return [] if choice == "none" else tools
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise InvalidRequest("tool_choice", f"{choice.function.name} is none of the tools: {', '.join(names)}")
    return chosen


def forced_call(tools: list[Tool]) -> dict[str, str]:
    """The fields of `SamplingParams` that make the answer a call of one of ``tools``."""
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": tool.function.name},
                "arguments": _moved(
                    tool.function.parameters or _NO_PARAMETERS, f"#/anyOf/{index}/properties/arguments"
                ),
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for index, tool in enumerate(tools)
    ]
    return {"json_schema": json.dumps({"anyOf": calls})}


def _moved(schema: Any, place: str) -> Any:
    """A schema that stands at ``place`` of another one: references to its own parts start there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved
