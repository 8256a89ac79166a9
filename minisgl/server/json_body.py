"""Request bodies as JSON, read strictly: anything that two JSON readers could understand differently is refused."""

from __future__ import annotations

import json
import logging
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from email.message import Message
from typing import Any, NoReturn

from fastapi import Request, Response
from fastapi.routing import APIRoute

from minisgl.server.config import ServerConfig
from minisgl.server.errors import IGNORED_FIELDS, ApiError, field_name

logger = logging.getLogger(__name__)

_UNPRINTABLE = re.compile(r"[^A-Za-z0-9_.\[\]-]")  # what a header must not hold
_LONGEST_NAME, _MOST_NAMES, _MOST_LOGGED = 80, 20, 200
_LOGGED: set[str] = set()  # each name is logged once
MAX_NESTING = 64  # levels of objects and lists: enough for any tool's schema; no option, since readers are recursive
_LONG_NUMBER = re.compile(rb"[0-9]{21}")
_TEXTS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class JsonRoute(APIRoute):
    """A route whose body, if it takes one, is read by `read_json`.

    Unless the app's state says ``strict``, fields that are not known are ignored and named in ``x-ignored-fields``.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler, takes_body = super().get_route_handler(), self.body_field is not None

        async def strict(request: Request) -> Response:
            if not takes_body:
                return await handler(request)
            _check_content_type(request.headers.get("content-type", ""))
            ignored: set[str] = set()
            before = IGNORED_FIELDS.set(None if request.app.state.strict else ignored)
            try:
                response = await handler(_JsonRequest(request.scope, request.receive))
            finally:
                IGNORED_FIELDS.reset(before)
            if ignored:
                names = sorted(_UNPRINTABLE.sub("?", name[:_LONGEST_NAME]) for name in ignored)[:_MOST_NAMES]
                response.headers["x-ignored-fields"] = ", ".join(names)
                _log_once(names)
            return response

        return strict


def _log_once(names: list[str]) -> None:
    for name in names:
        if name not in _LOGGED and len(_LOGGED) < _MOST_LOGGED:
            _LOGGED.add(name)
            logger.warning(
                "the field %s of a request is not known and was ignored; --strict refuses such requests", name
            )


class _JsonRequest(Request):
    async def json(self) -> Any:
        return read_json(await self.body(), *self.app.state.body_limits)


def _check_content_type(given: str) -> None:
    # Browsers let any page post text or forms to any address, but JSON only to servers that allow it (CORS).
    header = Message()
    header["content-type"] = given
    if header.get_content_type() != "application/json":
        raise ApiError(415, "the body must be sent with Content-Type: application/json")


def read_json(
    body: bytes, max_fields: int = ServerConfig.max_body_fields, max_values: int = ServerConfig.max_body_values
) -> Any:
    """Parse ``body``; `ApiError` 400 for bad UTF-8 or JSON, repeated keys, deep nesting, invalid numbers or texts.

    A body with more fields, objects and lists, or values than allowed is refused before any of it is parsed.
    """
    _check_size(body, max_fields, max_values)
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object, parse_constant=_constant, parse_int=_parser(body))
    except UnicodeDecodeError as error:
        raise ApiError(400, f"the body is not valid UTF-8 ({error.reason} at byte {error.start})") from error
    except json.JSONDecodeError as error:
        raise ApiError(400, f"the body is not valid JSON: {error.msg} at character {error.pos}") from error
    except RecursionError as error:
        raise _too_deep() from error
    if body.count(b"[") + body.count(b"{") > MAX_NESTING:  # fewer cannot be nested deeper
        _check_nesting(value)
    if b"\\u" in body:  # the only way to write half of a surrogate pair in UTF-8
        _check_text(value, ())
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        name = ascii(twice if len(twice) <= 80 else twice[:77] + "...")  # it may hold lone surrogates
        raise ApiError(400, f"the body names {name} twice in one object")
    return result


def _constant(word: str) -> NoReturn:
    raise ApiError(400, f"the body is not valid JSON: {word} is not a JSON number")


def _check_size(body: bytes, max_fields: int, max_values: int) -> None:
    if len(body) <= min(max_fields, max_values):  # each takes a byte at least
        return
    rest = _TEXTS.sub(b"", body)
    counts = {
        "objects and lists": (rest.count(b"{") + rest.count(b"["), max_fields, "max-body-fields"),
        "fields": (rest.count(b":"), max_fields, "max-body-fields"),
        "values": (rest.count(b",") + 1, max_values, "max-body-values"),
    }
    for what, (number, limit, option) in counts.items():
        if number > limit:
            message = f"the body has {number} {what}; at most {limit} are read, so split it, or raise --{option}"
            raise ApiError(400, message, code="body_too_large")


def _parser(body: bytes) -> Callable[[str], int]:
    # Python's own is quick, and all that is needed where no number is long.
    return _integer if _LONG_NUMBER.search(body) else int


def _integer(digits: str) -> int:
    if len(digits) > 20:  # 2 ** 64 has 20 digits, and no field takes more
        raise ApiError(400, f"the body has an integer of {len(digits)} digits; no field takes more than 64 bits")
    return int(digits)


def _check_nesting(value: Any) -> None:
    level = [value]
    for _ in range(MAX_NESTING):
        level = [child for parent in level for child in _children(parent) if isinstance(child, (dict, list))]
        if not level:
            return
    raise _too_deep()


def _children(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep() -> ApiError:
    return ApiError(400, f"the body has more than {MAX_NESTING} objects and lists inside of each other")


def _check_text(value: Any, path: tuple[str | int, ...]) -> None:
    if isinstance(value, str):
        _check_unicode(value, path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_text(item, (*path, index))
    elif isinstance(value, dict):
        for name, item in value.items():
            _check_unicode(name, path)
            _check_text(item, (*path, name))


def _check_unicode(text: str, path: tuple[str | int, ...]) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        field = field_name(path) or None
        message = f"must be valid Unicode, but has a lone surrogate at character {error.start}"
        raise ApiError(400, f"{field or 'the body'}: {message}", field) from error
