"""``/openapi.json``: the endpoints, with every status that each can answer with."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from minisgl.server.replies import ErrorReply

_MEANINGS = {
    400: "The request is malformed, or asks for what this model or server cannot do; param names the field.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The time limit passed before the answer was finished.",
    413: "The body is too large.",
    415: "The body is not sent as JSON.",
    500: "The engine could not finish the request.",
    503: "The queue is full, and Retry-After says when to come again; or the engine is dead or shutting down.",
}


READS = (401,)
"""Statuses of errors, beside 200, that an endpoint without a body can answer with."""
ASKS = (401, 503)
"""Of one that has to ask the engine."""
TAKES_BODY = (400, 401, 404, 413, 415, 503)
"""Of one that takes a body."""
GENERATES = (*TAKES_BODY, 408, 500)
"""Of one that generates."""


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` for statuses of errors."""
    return {status: {"model": ErrorReply, "description": _MEANINGS[status]} for status in sorted(set(statuses))}


def streams(reply: Any) -> dict[int | str, dict[str, Any]]:
    """FastAPI's ``responses`` for an answer that is ``reply``, or a stream of chunks if the client wants one."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    text = "The answer; of a stream, each event is a chunk, and the last is [DONE] or an error."
    return {200: {"model": reply, "description": text, "content": {"text/event-stream": {"itemSchema": event}}}}


def describe(app: FastAPI, model: str, with_key: bool) -> None:
    """Let ``app.openapi`` tell what this server takes: its own model, the key if there is one.

    Args:
        app: with all its routes.
        model: its name.
        with_key: whether requests need a key.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = _document(app, model, with_key)
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _document(app: FastAPI, model: str, with_key: bool) -> dict[str, Any]:
    document = get_openapi(title=app.title, version=app.version, description=app.description, routes=app.routes)
    for path in document["paths"].values():
        for operation in path.values():
            for parameter in operation.get("parameters", ()):
                if parameter["name"] == "model":
                    parameter["schema"] = {"enum": [model]}
            operation["responses"].pop("422", None)  # FastAPI's own; here a malformed body is a 400
            if not with_key:
                operation["responses"].pop("401", None)
    schemas = document["components"]["schemas"]
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    for name, schema in schemas.items():
        if name.endswith("Request") and "model" in schema["properties"]:
            required = "model" in schema.get("required", ())
            schema["properties"]["model"] = {"enum": [model] if required else [model, None], "title": "Model"}
    if with_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
    return document
