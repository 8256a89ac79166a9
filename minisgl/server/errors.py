"""Errors as HTTP: every one of them leaves in the shape of OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from minisgl.errors import EngineDead, InvalidRequest, MiniSGLError, QueueFull

RETRY_AFTER = 1
"""Seconds after which a client whose request found the queue full may try again."""


class ApiError(Exception):
    """An error with its HTTP status.

    Args:
        status: HTTP status code.
        message: for people.
        param: the request's field that is to blame, if one is.
        code: for programs, if there is something to tell beyond the status.
    """

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an answer of its own."""
        headers = {"Retry-After": str(RETRY_AFTER)} if self.code == "queue_full" else None
        return Response(to_json(self.body()), self.status, headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of ``error``."""
    match error:
        case ApiError():
            return error
        case InvalidRequest():
            return ApiError(400, str(error), error.field)
        case QueueFull():
            return ApiError(503, str(error), code="queue_full")
        case EngineDead():
            return ApiError(503, str(error), code="engine_dead")
        case RequestValidationError():
            return _malformed(error)
        case HTTPException():
            return ApiError(error.status_code, str(error.detail))
        case MiniSGLError():
            return ApiError(500, str(error))
        case _:
            return ApiError(500, f"{type(error).__name__}: {error}")


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8. Half a surrogate pair, which a client may have sent, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _malformed(error: RequestValidationError) -> ApiError:
    """A body that is no JSON, or not what the endpoint takes: the first thing that is wrong with it."""
    first = error.errors()[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not valid JSON: {first['ctx']['error']}")
    field = field_name(first["loc"][1:])
    if not field:
        return ApiError(400, "the body must be a JSON object, sent with Content-Type: application/json")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"{field}: this field is not supported", field)
    if first["type"] == "value_error":
        return ApiError(400, f"{field}: {first['ctx']['error']}", field)
    return ApiError(400, f"{field}: {first['msg']}", field)


def field_name(path: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removeprefix(".")
