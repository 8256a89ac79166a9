"""Bodies of ``POST /v1/completions``: good ones, and every way of being wrong that a server must withstand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

_encode = msgspec.json.encode
Body = Mapping[str, Any]

MALFORMED: dict[str, Callable[[Body], bytes]] = {
    "cut off": lambda body: _encode(body)[:-7],
    "no JSON": lambda body: b"prompt=hello&max_tokens=5",
    "no UTF-8": lambda body: _encode({**body, "prompt": "x"}).replace(b'"x"', b'"\xff\xfe"'),
    "no object": lambda body: _encode([body]),
    "no prompt": lambda body: _encode({key: value for key, value in body.items() if key != "prompt"}),
    "empty prompt": lambda body: _encode({**body, "prompt": []}),
    "negative token": lambda body: _encode({**body, "prompt": [1, -5]}),
    "unknown token": lambda body: _encode({**body, "prompt": [2**31 - 1]}),
    "prompt of objects": lambda body: _encode({**body, "prompt": [{"token": 1}]}),
    "negative max_tokens": lambda body: _encode({**body, "max_tokens": -5}),
    "max_tokens in words": lambda body: _encode({**body, "max_tokens": "many"}),
    "endless max_tokens": lambda body: _encode({**body, "max_tokens": 10**12}),
    "temperature below zero": lambda body: _encode({**body, "temperature": -1.0}),
    "unknown field": lambda body: _encode({**body, "max_tokns": 5}),
    "unknown model": lambda body: _encode({**body, "model": "no such model"}),
}
"""By what is wrong with them."""


def completion_body(model: str, prompt: list[int], max_tokens: int, stream: bool, malformed: str | None) -> bytes:
    """A request for exactly ``max_tokens`` greedy tokens, made wrong in the way that ``malformed`` names."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": stream,
    }
    if stream:
        body["stream_options"] = {"include_usage": True}
    return _encode(body) if malformed is None else MALFORMED[malformed](body)
