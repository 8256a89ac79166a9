"""Tool calls: how a request offers and forces them, and how calls are parsed from a model's text."""

from __future__ import annotations

import json
from collections.abc import Container, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NoReturn

from pydantic import PlainValidator, StrictBool, StrictStr, StringConstraints, ValidationError

from minisgl.errors import InvalidRequest
from minisgl.server.json_schema import plain_schema
from minisgl.server.requests import ApiObject

_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
FunctionName = Annotated[StrictStr, StringConstraints(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(ApiObject):
    """A function's description for the model. ``parameters`` is a JSON schema; none means no parameters.

    ``strict`` changes nothing: a call that is demanded keeps to the schema, any other need not.
    """

    place = "tools[].function"
    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(ApiObject):
    """A function that the client can call."""

    place = "tools[]"
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as chat templates expect it, without ``strict``."""
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": function}


class FunctionChoice(ApiObject):
    """The name of a function."""

    place = "tool_choice.function"
    name: FunctionName


class NamedChoice(ApiObject):
    """The function that must be called."""

    place = "tool_choice"
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
    """The functions that the model may call. Raises `InvalidRequest` for a wrong choice or repeated names."""
    if not tools:
        if choice not in (None, "none", "auto"):
            raise InvalidRequest("tool_choice", "is only allowed with tools")
        return []
    names = [tool.function.name for tool in tools]
    if len(set(names)) < len(names):
        raise InvalidRequest("tools", "names a function twice")
    if not isinstance(choice, NamedChoice):
        return [] if choice == "none" else tools
    chosen = [tool for tool in tools if tool.function.name == choice.function.name]
    if not chosen:
        raise InvalidRequest("tool_choice", f"{choice.function.name} is none of the tools: {', '.join(names)}")
    return chosen


def forced_call(tools: list[Tool], or_else: Any = None) -> dict[str, str]:
    """The fields of `SamplingParams` that make the answer a call of one of ``tools``, or of the schema ``or_else``."""
    calls = []
    for index, tool in enumerate(tools):
        schema = plain_schema(tool.function.parameters or _NO_PARAMETERS, f"tools[{index}].function.parameters")
        parameters = _moved(schema, f"#/anyOf/{index}/properties/arguments")
        properties = {"name": {"const": tool.function.name}, "arguments": parameters}
        fixed = {"required": ["name", "arguments"], "additionalProperties": False}
        calls.append({"type": "object", "properties": properties, **fixed})
    if or_else is not None:
        calls.append(_moved(or_else, f"#/anyOf/{len(calls)}"))
    return {"json_schema": json.dumps({"anyOf": calls})}


def _moved(schema: Any, place: str) -> Any:
    """Adapt a schema to its new ``place`` within another one: its local references start there."""
    if isinstance(schema, list):
        return [_moved(item, place) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(value, place) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = place + reference.removeprefix("#")
    return moved


_BLANK = " \t\r\n"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A parsed call; ``arguments`` is JSON text."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolSyntax:
    """How a family of models writes a call: a JSON object with the function's name and arguments."""

    openings: tuple[str, ...]  # may come before the object, the empty string included
    first_keys: tuple[str, ...]  # the object begins with one of these, without spaces
    closing: str  # follows the object
    arguments: str  # the object's key of the arguments
    separators: str = _BLANK  # characters that may come before a call and mean nothing
    anywhere: bool = False  # a call may follow other text, instead of only beginning the answer

    def begins(self, text: str) -> bool | None:
        """Whether a call begins with ``text``; None if more of it must be seen."""
        compact = "".join(text.lstrip(self.separators).split())
        wholes = [opening + keys for opening in self.openings for keys in self.first_keys]
        if any(compact.startswith(whole) for whole in wholes):
            return True
        return None if any(whole.startswith(compact) for whole in wholes) else False


TOOL_PARSERS: Mapping[str, ToolSyntax] = {
    "qwen": ToolSyntax(("<tool_call>",), ("{",), "</tool_call>", "arguments", anywhere=True),
    "llama3": ToolSyntax(
        ("", "<|python_tag|>"), ('{"name":', '{"type":"function"'), "", "parameters", separators=_BLANK + ";"
    ),
}
# A call that ``tool_choice`` demands has the form of our JSON schema, not the model's own
FORCED = ToolSyntax(("",), ('{"name":',), "", "arguments")


def syntax_for(parser: str, template: str | None) -> ToolSyntax | None:
    """The syntax by the option ``--tool-parser`` or by the chat template; None if the model cannot call tools."""
    if template is None or "tools" not in template or parser == "none":
        return None
    if parser != "auto":
        return TOOL_PARSERS[parser]
    if "<tool_call>" in template:
        return TOOL_PARSERS["qwen"]
    if "<|python_tag|>" in template or "<|start_header_id|>" in template:
        return TOOL_PARSERS["llama3"]
    return None


class CallReader:
    """Separates one answer into text and calls, while it arrives in pieces of any size.

    Only text that may begin a call is held back. A call is returned whole, once it is valid JSON that names one of the
    request's functions; what turns out to be no call is returned as text. Unless there may be ``several``, the answer
    ends with its first call: what the model writes after that is dropped, and `complete` is true.
    """

    def __init__(self, syntax: ToolSyntax, names: Container[str], several: bool = True) -> None:
        self._syntax = syntax
        self._names = names
        self._several = several
        self._held = ""
        self._object = _ObjectEnd()
        self._text_sent = False
        self._called = False

    @property
    def complete(self) -> bool:
        """Whether the answer has ended, however much more the model writes."""
        return self._called and not self._several

    def feed(self, text: str) -> list[str | ToolCall]:
        """Add text of the answer; returns the text and calls that are certain now, in order."""
        self._held += "" if self.complete else text
        pieces: list[str | ToolCall] = []
        while self._held:
            start = self._find()
            self._send(pieces, start)
            if not self._held or not self._decide(pieces, complete=False):
                break
        return pieces

    def finish(self) -> list[str | ToolCall]:
        """The remaining text and calls, when the answer has ended."""
        pieces: list[str | ToolCall] = []
        while self._held.strip(self._syntax.separators):
            self._decide(pieces, complete=True)
            self._send(pieces, self._find())
        if not self._called:  # otherwise it is the line end after the last call
            self._send(pieces, len(self._held))
        return pieces

    def _find(self) -> int:
        """Where the held text may begin a call; its length if nowhere."""
        held, syntax = self._held, self._syntax
        if not syntax.anywhere:
            return len(held) if self._text_sent else 0
        (opening,) = syntax.openings
        start = held.find(opening)
        if start < 0:
            start = len(held) - _overlap(held, opening)
        return len(held[:start].rstrip(syntax.separators))

    def _decide(self, pieces: list[str | ToolCall], complete: bool) -> bool:
        """Move a call, or text that cannot begin one, from the held text to ``pieces``. False if neither is certain."""
        if not self._object.begun:
            begins = self._syntax.begins(self._held)
            if begins is None and not complete:
                return False
            if not begins:
                return self._reject(pieces)
            self._object.begin(self._held.index("{"))
        end = self._object.find(self._held)
        if end is None:
            return complete and self._reject(pieces)
        rest, closing = self._held[end:].lstrip(_BLANK), self._syntax.closing
        if not rest.startswith(closing):
            if not closing.startswith(rest):
                return self._reject(pieces)
            if not complete:
                return False
        call = self._parse(self._held[self._object.start : end])
        if call is None:
            return self._reject(pieces)
        pieces.append(call)
        self._called = True
        self._held = rest[len(closing) :] if self._several else ""
        self._object = _ObjectEnd()
        return True

    def _reject(self, pieces: list[str | ToolCall]) -> bool:
        """The held text begins no call; another one may begin after its first character."""
        blanks = len(self._held) - len(self._held.lstrip(self._syntax.separators))
        self._send(pieces, blanks + 1)
        self._object = _ObjectEnd()
        return True

    def _send(self, pieces: list[str | ToolCall], count: int) -> None:
        if count:
            pieces.append(self._held[:count])
            self._held = self._held[count:]
            self._text_sent = True

    def _parse(self, text: str) -> ToolCall | None:
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return None
        name, arguments = value.get("name"), value.get(self._syntax.arguments, {})
        if not isinstance(name, str) or name not in self._names or not isinstance(arguments, dict):
            return None
        return ToolCall(name, json.dumps(arguments, ensure_ascii=False))


class _ObjectEnd:
    """Finds the end of a JSON object in a growing text; reads every character once."""

    def __init__(self) -> None:
        self.start = -1
        self._end: int | None = None
        self._read = 0
        self._depth = 0
        self._in_string = False
        self._escaped = False

    @property
    def begun(self) -> bool:
        return self.start >= 0

    def begin(self, start: int) -> None:
        self.start = self._read = start

    def find(self, text: str) -> int | None:
        """Index after the object's last brace, or None if it has not arrived."""
        while self._end is None and self._read < len(text):
            self._step(text[self._read])
            self._read += 1
            if self._depth == 0:
                self._end = self._read
        return self._end

    def _step(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        else:
            self._depth += (char == "{") - (char == "}")


def _overlap(text: str, opening: str) -> int:
    """Length of the longest end of ``text`` that ``opening`` begins with."""
    lengths = range(min(len(text), len(opening) - 1), 0, -1)
    return next((length for length in lengths if text.endswith(opening[:length])), 0)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
