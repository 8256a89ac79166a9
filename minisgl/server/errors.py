"""Errors as HTTP answers in OpenAI's format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from starlette.exceptions import HTTPException

from minisgl.errors import ContextExceeded, EngineDead, InvalidRequest, MiniSGLError, QueueFull

logger = logging.getLogger(__name__)
_encode = msgspec.json.Encoder().encode

RETRY_AFTER = 1  # seconds after which a client may try again if the queue was full
_ROUTING = {404: "not_found", 405: "method_not_allowed"}
_VALIDATION = {"missing": "missing_required_parameter", "extra_forbidden": "unknown_parameter"}
_CACHED = "prefixes are always cached; leave it out"
_LEAVE_OUT = ("moderation", "prediction", "reasoning_effort", "verbosity", "web_search_options")
# Fields of OpenAI's API that this server does not have, and what to do instead
INSTEAD = {
    **dict.fromkeys(_LEAVE_OUT, "leave it out"),
    **dict.fromkeys(("prompt_cache_key", "prompt_cache_retention"), _CACHED),
    **dict.fromkeys(
        ("conversation", "previous_response_id"), "nothing is stored; send the whole conversation as input"
    ),
    "audio": "answers are text only; leave it out",
    "chat_template": "the model's own chat template is used; leave it out",
    "function_call": "it is superseded; use tool_choice",
    "functions": "it is superseded; use tools",
    "guided_choice": "use response_format with type regex",
    "guided_json": "use response_format with type json_schema",
    "guided_regex": "use response_format with type regex",
    "image_data": "prompts are texts only; leave it out",
    "metadata": "nothing is stored; leave it out",
    "safety_identifier": "use user",
    "structured_outputs": "use response_format",
}


# Those of them that would change the answer: refused by every server, where other unknown fields may be ignored.
UNSUPPORTED = INSTEAD.keys() - {
    *_LEAVE_OUT,
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
}


# Names of what is ignored of the body that is being read; None where it is refused instead. See `JsonRoute`.
IGNORED_FIELDS: ContextVar[set[str] | None] = ContextVar("minisgl_ignored_fields", default=None)


class ApiError(HTTPException):
    """An error with its HTTP status, OpenAI's ``param`` (the field at fault) and ``code`` (for programs)."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as OpenAI's clients expect it."""
        clients_fault = self.status_code < 500 and self.status_code != 408  # the server was too slow
        kind = "invalid_request_error" if clients_fault else "server_error"
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> Response:
        """The error as an HTTP answer."""
        return Response(to_json(self.body()), self.status_code, self.headers, media_type="application/json")


def as_api_error(error: Exception) -> ApiError:
    """The answer to a client for ``error``. Details of unexpected errors go to the log only."""
    match error:
        case ApiError():
            return error
        case ContextExceeded():
            return ApiError(400, str(error), error.field, "context_length_exceeded")
        case InvalidRequest():
            return ApiError(400, str(error), error.field, "invalid_value")
        case QueueFull():
            return ApiError(503, str(error), code="queue_full", headers={"Retry-After": str(RETRY_AFTER)})
        case EngineDead():
            return ApiError(503, str(error), code="engine_dead")
        case RequestValidationError():
            return _malformed(error)
        case HTTPException():
            code = _ROUTING.get(error.status_code)
            return ApiError(error.status_code, str(error.detail), code=code, headers=error.headers)
        case MiniSGLError():
            return ApiError(500, str(error), code="generation_failed")
        case _:
            logger.error("unexpected error while answering a request", exc_info=error)
            return ApiError(500, "internal error; the server's log has it", code="internal_error")


def to_json(value: object) -> bytes:
    """Compact JSON in UTF-8. Lone surrogates, which only a model's name in a path can have, become ``?``."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")


def _malformed(error: RequestValidationError) -> ApiError:
    first = error.errors()[0]
    kind = first["type"]
    field = field_name(first["loc"][1:])
    if not field:
        return ApiError(400, "the body must be a JSON object", code="invalid_type")
    if kind == "extra_forbidden" and (instead := INSTEAD.get(field)):
        return ApiError(400, f"{field}: this field is not supported; {instead}", field, "unsupported_parameter")
    message = {"extra_forbidden": "this field is not known", "missing": "this field is required"}.get(kind)
    if kind == "value_error":
        message = str(first["ctx"]["error"])
    return ApiError(400, f"{field}: {message or first['msg']}", field, _VALIDATION.get(kind, "invalid_value"))


def field_name(path: Sequence[str | int]) -> str:
    """``("messages", 0, "role")`` as ``messages[0].role``."""
    name = ""
    for part in path:
        name += f"[{part}]" if isinstance(part, int) else f".{part}"
    return name.removeprefix(".")
