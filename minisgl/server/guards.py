"""What stands between a connection and the routes: who may come in, and how much they may bring.

Plain ASGI, inside of `minisgl.server.request_log.RequestLog`, which turns the errors that they raise into answers.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from minisgl.server.errors import ApiError

_CHALLENGE = {"WWW-Authenticate": "Bearer"}


class KeyGuard:
    """Lets in whoever knows the key, before anything of a body is read.

    Args:
        app: what is guarded.
        key: that clients send as ``Authorization: Bearer KEY``.
    """

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on or refuse a request (ASGI)."""
        if scope["type"] == "lifespan" or is_open(scope["path"]) or self._knows_key(scope):
            await self._app(scope, receive, send)
        else:
            message = "the API key is missing or wrong; send it as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key", headers=_CHALLENGE)

    def _knows_key(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        return hmac.compare_digest(given, self._expected)  # takes as long for a good guess as for a bad one


def is_open(path: str) -> bool:
    """Whether a path needs no key: what tells nothing about anybody's requests."""
    return path in ("/health", "/ui") or (path.startswith("/ui/") and path != "/ui/events")


class BodyLimit:
    """Stops reading a body that is too large, whether its length was announced or not.

    Args:
        app: what reads the bodies.
        limit: most bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app = app
        self._limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request (ASGI)."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if int(announced) > self._limit:
            raise self._error()
        size = 0

        async def limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > self._limit:
                raise self._error()
            return message

        await self._app(scope, limited, send)

    def _error(self) -> ApiError:
        message = f"the body is larger than {self._limit} bytes; send less, or raise --max-body-size"
        return ApiError(413, message, code="body_too_large")
