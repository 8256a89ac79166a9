"""``response_format``: the form that an answer must have, as the sampler is told of it."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import Field, StrictBool, StrictStr

from minisgl.errors import InvalidRequest
from minisgl.server.requests import ApiObject

_ANY_OBJECT = {"type": "object"}


class JsonSchema(ApiObject):
    """A schema and its name. It holds strictly, whatever ``strict`` says; name and description are for people."""

    name: StrictStr
    description: StrictStr | None = None
    json_schema: dict[str, Any] = Field(_ANY_OBJECT, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(ApiObject):
    """``text``, ``json_object``, ``json_schema``, or this server's own ``regex``."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    regex: StrictStr | None = None

    def constraint(self) -> dict[str, str]:
        """The fields of `SamplingParams` that say the same.

        Raises:
            InvalidRequest: a field is missing, or belongs to another type.
        """
        for name in ("json_schema", "regex"):
            if (getattr(self, name) is None) is (self.type == name):
                only = "is required with" if self.type == name else "is only allowed with"
                raise InvalidRequest(f"response_format.{name}", f"{only} type {name}")
        if self.type == "text":
            return {}
        if self.type == "regex":
            return {"regex": str(self.regex)}
        schema = _ANY_OBJECT if self.json_schema is None else self.json_schema.json_schema
        return {"json_schema": json.dumps(schema)}
