"""JSON schemas as clients write them, in the words that the grammar compiler knows.

Pydantic describes sets, bytes, addresses and dictionaries with words that llguidance refuses. What such a word demands
is said in other words here; where that is impossible and the answer is still one of the right type, the word is left
out and named in `IGNORED_FIELDS`, or refused by a strict server.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from minisgl.errors import InvalidRequest
from minisgl.server.errors import IGNORED_FIELDS

_HEX = "[0-9a-f]"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])"
_SAID_BY_PATTERN = {
    "base64": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2}==|[A-Za-z0-9_-]{3}=)?$",
    "ipv4interface": f"^{_BYTE}(?:\\.{_BYTE}){{3}}/(?:3[0-2]|[12]?[0-9])$",
}
_ANY_TEXT = {"binary", "file-path", "password", "path"}  # formats that say nothing about the text
# Formats that the compiler knows; all others are, as the standard has it, remarks for readers.
_KNOWN = {"date-time", "date", "time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"}
# Names of properties can be demanded by a pattern alone.
_NAMES = {
    "date": "^[0-9]{4}-(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])$",
    "uuid": f"^{_HEX}{{8}}-(?:{_HEX}{{4}}-){{3}}{_HEX}{{12}}$",
    **_SAID_BY_PATTERN,
}
_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_SCHEMAS = ("items", "additionalProperties", "additionalItems", "not", "contains")
_LISTS = ("anyOf", "allOf", "oneOf", "prefixItems")


def plain_schema(schema: Any, field: str) -> Any:
    """``schema`` with the same meaning for the grammar compiler, as far as it can say that.

    Raises `InvalidRequest` for ``field`` if a strict server was asked for a word that would have to be left out.
    """
    rewriter = _Rewriter(schema, field)
    plain = rewriter.rewritten(schema)
    if rewriter.definitions:
        plain["$defs"] = {**plain.get("$defs", {}), **rewriter.definitions}
    return plain


def plain_schema_text(text: str, field: str) -> str:
    """The same for a schema that is a text; what cannot be read is left to the compiler's errors."""
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    with suppress(RecursionError):
        return json.dumps(plain_schema(schema, field))
    return text


class _Rewriter:
    def __init__(self, root: Any, field: str) -> None:
        self._root = root
        self._field = field
        self.definitions: dict[str, Any] = {}  # of values that several properties have

    def rewritten(self, schema: Any) -> Any:
        if not isinstance(schema, dict):
            return schema
        new = dict(schema)
        for name in _SCHEMAS:
            if name in new:
                new[name] = self.rewritten(new[name])
        for name in _LISTS:
            if isinstance(new.get(name), list):
                new[name] = [self.rewritten(item) for item in new[name]]
        for name in _NAMED_SCHEMAS:
            if isinstance(new.get(name), dict):
                new[name] = {key: self.rewritten(value) for key, value in new[name].items()}
        if new.pop("uniqueItems", False) is True:
            self._leave_out("uniqueItems")
        self._format(new)
        self._property_names(new)
        return new

    def _format(self, schema: dict[str, Any]) -> None:
        kind = schema.get("format")
        if not isinstance(kind, str) or kind in _KNOWN:
            return
        del schema["format"]
        if kind in _SAID_BY_PATTERN and "pattern" not in schema:
            schema["pattern"] = _SAID_BY_PATTERN[kind]
        elif kind not in _ANY_TEXT:
            self._leave_out(f"format.{kind}")

    def _property_names(self, schema: dict[str, Any]) -> None:
        """Say which names of properties are allowed by the properties themselves."""
        if "propertyNames" not in schema:
            return
        names = self._resolved(schema.pop("propertyNames"))
        values = schema.get("additionalProperties", True)
        allowed, pattern = _allowed_names(names)
        if {"properties", "patternProperties", "required"} & schema.keys() or (allowed is None and pattern is None):
            if names.keys() - {"type", "title", "description"}:
                self._leave_out("propertyNames")
            return
        schema["additionalProperties"] = False
        if allowed is None:
            schema["patternProperties"] = {pattern: values}
            return
        name = f"values-{len(self.definitions)}"
        self.definitions[name] = values
        schema["properties"] = {key: {"$ref": f"#/$defs/{name}"} for key in allowed}

    def _resolved(self, schema: Any) -> Mapping[str, Any]:
        """What a local reference, as to an enumeration of Python, means."""
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if isinstance(reference, str) and reference.startswith("#/"):
            schema = _found(self._root, reference.removeprefix("#/").split("/"))
        return schema if isinstance(schema, dict) else {}

    def _leave_out(self, word: str) -> None:
        ignored = IGNORED_FIELDS.get()
        if ignored is None:
            raise InvalidRequest(self._field, f"the schema's {word} is not supported; leave it out")
        ignored.add(f"{self._field}.{word}")


def _allowed_names(names: Mapping[str, Any]) -> tuple[list[str] | None, str | None]:
    """The names that a schema of names lists, or else the pattern that it demands."""
    listed = names.get("enum", [names["const"]] if "const" in names else None)
    if isinstance(listed, list) and all(isinstance(name, str) for name in listed):
        return listed, None
    pattern, kind = names.get("pattern"), names.get("format")
    if pattern is None and isinstance(kind, str):
        pattern = _NAMES.get(kind)
    return None, pattern if isinstance(pattern, str) else None


def _found(root: Any, path: Iterable[str]) -> Any:
    for name in path:
        root = root.get(name) if isinstance(root, dict) else None
    return root
