"""Schemas as Pydantic and others write them: said in other words, or named where a part of them is left out."""

from __future__ import annotations

import datetime
import enum
import ipaddress
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import Base64Bytes, BaseModel, SecretStr, TypeAdapter, create_model

from minisgl.errors import InvalidRequest
from minisgl.grammar import Grammars
from minisgl.sampling_params import SamplingParams
from minisgl.server.errors import IGNORED_FIELDS
from minisgl.server.json_schema import plain_schema
from tests.tiny_tokenizer import tiny_tokenizer


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


TYPES: dict[str, Any] = {
    "set": (set[int], "uniqueItems"),
    "frozenset of texts": (frozenset[str], "uniqueItems"),
    "bytes": (bytes, None),
    "address": (ipaddress.IPv4Address | ipaddress.IPv6Address, None),
    "network": (ipaddress.IPv4Network, "format.ipv4network"),
    "interface": (ipaddress.IPv4Interface, None),
    "base64": (Base64Bytes, None),
    "path": (Path, None),
    "secret": (SecretStr, None),
    "keys of two": (dict[Literal["a", "b"], int], None),
    "keys of an enumeration": (dict[Colour, list[int]], None),
    "keys of keys": (dict[Literal["a"], dict[Literal["b", "c"], int]], None),
    "keys of bytes": (dict[uuid.UUID, int], None),
    "keys of days": (dict[datetime.date, int], None),
}


@pytest.fixture(autouse=True)
def ignored() -> Iterator[set[str]]:
    names: set[str] = set()
    before = IGNORED_FIELDS.set(names)
    yield names
    IGNORED_FIELDS.reset(before)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    tokenizer = tiny_tokenizer("byte-level")
    return Grammars(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)


def schema_of(kind: Any) -> dict[str, Any]:
    return create_model("Reply", value=(kind, ...)).model_json_schema()


def takes(grammars: Grammars, schema: Any, text: str) -> bool:
    """Whether a text is a whole output of a schema."""
    constraint = grammars.constraint(SamplingParams(json_schema=json.dumps(schema)))
    assert constraint is not None
    matcher = constraint.matcher
    for byte in text.encode():
        token = next(id for id in range(4, 300) if grammars._tokens.decode_bytes([id]) == bytes([byte]))
        if not matcher.consume_token(token):
            return False
    return bool(matcher.is_accepting())


@pytest.mark.parametrize(("kind", "left_out"), TYPES.values(), ids=TYPES)
def test_types_of_pydantic_compile(grammars: Grammars, ignored: set[str], kind: Any, left_out: str | None) -> None:
    schema = schema_of(kind)
    assert grammars.constraint(SamplingParams(json_schema=json.dumps(plain_schema(schema, "schema")))) is not None
    assert ignored == (set() if left_out is None else {f"schema.{left_out}"})


ADDRESS, DAY, KEY = "1.2.3.255/24", "2024-02-28", "01234567-89ab-cdef-0123-456789abcdef"


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (dict[Literal["a", "b"], int], {"a": 1, "b": 2}, {"c": 1}),
        (dict[Colour, list[int]], {"blue": [1]}, {"green": [1]}),
        (dict[Literal["a"], dict[Literal["b"], int]], {"a": {"b": 1}}, {"a": {"a": 1}}),
        (dict[uuid.UUID, int], {KEY: 1}, {"x": 1}),
        (dict[datetime.date, int], {DAY: 1}, {"2024-13-01": 1}),
        (Base64Bytes, "aGk=", "aGk"),
        (ipaddress.IPv4Interface, ADDRESS, "1.2.3.256/24"),
    ],
)
def test_what_is_said_in_other_words_means_the_same(grammars: Grammars, kind: Any, good: Any, bad: Any) -> None:
    schema = plain_schema(schema_of(kind), "schema")
    TypeAdapter(kind).validate_python(good)
    with pytest.raises(ValueError, match="validation error"):
        TypeAdapter(kind).validate_python(bad)
    assert takes(grammars, schema, json.dumps({"value": good}))
    assert not takes(grammars, schema, json.dumps({"value": bad}))


def test_properties_may_have_the_names_of_such_words() -> None:
    schema = {
        "type": "object",
        "properties": {"uniqueItems": {"const": {"uniqueItems": True}}, "format": {"enum": ["odd"]}},
    }
    assert plain_schema(schema, "schema") == schema


def test_a_strict_server_refuses_what_it_would_leave_out() -> None:
    before = IGNORED_FIELDS.set(None)
    try:
        with pytest.raises(InvalidRequest, match="uniqueItems is not supported") as caught:
            plain_schema(schema_of(set[int]), "schema")
    finally:
        IGNORED_FIELDS.reset(before)
    assert caught.value.field == "schema"


def test_many_keys_of_many_keys_stay_small() -> None:
    keys: Any = {"type": "integer"}
    for _ in range(20):
        keys = {"type": "object", "additionalProperties": keys, "propertyNames": {"enum": [f"k{n}" for n in range(20)]}}
    assert len(json.dumps(plain_schema({"type": "object", "properties": {"x": keys}}, "schema"))) < 50_000


@pytest.mark.parametrize(
    "schema",
    [
        {"propertyNames": {"enum": 5}},
        {"propertyNames": 5},
        {"propertyNames": {"format": []}},
        {"format": []},
        {"propertyNames": {"$ref": "#/a/b"}},
        {"anyOf": 5, "properties": []},
        True,
    ],
)
def test_nonsense_is_left_to_the_compiler(schema: Any) -> None:
    plain_schema(schema, "schema")


class Point(BaseModel):
    """The reply of the test below."""

    tags: set[str]


def test_a_server_names_what_it_leaves_out(server: Any) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "point", "schema": Point.model_json_schema()}}
    messages = [{"role": "user", "content": "hello"}]
    body = {"model": server.model, "messages": messages, "max_tokens": 4, "response_format": form}
    reply = server.http.post("/v1/chat/completions", json=body)
    assert (reply.status_code, reply.headers["x-ignored-fields"]) == (
        200,
        "response_format.json_schema.schema.uniqueItems",
    )
