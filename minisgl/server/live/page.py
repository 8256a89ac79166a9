"""Text in place of tokens: the last station of a state on its way to a page."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any, Protocol

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minisgl.errors import MiniSGLError
from minisgl.server.errors import as_api_error, to_json
from minisgl.server.live.state import LiveState
from minisgl.server.streaming import event, until_disconnect
from minisgl.tokenizer import Tokenizer

_REMEMBERED = 4096
"""Texts of nodes and requests that are kept, because the next state has most of them again."""


class Spelled:
    """Writes states as JSON, each once for all who watch.

    Args:
        tokenizer: the model's. If the checkpoint has none, the ids are shown.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._spell = lru_cache(_REMEMBERED)(self._text)
        self._state: LiveState | None = None
        self._json = b""

    def json(self, state: LiveState) -> bytes:
        """The state with its texts, in one line."""
        if state is not self._state:
            for node in state.nodes:
                node.text = self._spell(tuple(node.head))
            for request in state.requests:
                request.text = self._spell(tuple(request.tail))
            self._state, self._json = state, msgspec.json.encode(state)
        return self._json

    def _text(self, token_ids: tuple[int, ...]) -> str:
        if not self._tokenizer.available:
            return " ".join(map(str, token_ids))
        return self._tokenizer.spell(token_ids)


_MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
"""Nothing from elsewhere, nothing inline: the page shows text that anybody may have sent."""


class Watchable(Protocol):
    """What the page needs of an engine."""

    tokenizer: Tokenizer

    def watch(self) -> AsyncGenerator[LiveState, None]:
        """States of the engine, see `LiveFeed.states`."""
        ...


def add_live_page(app: FastAPI, engine: Watchable) -> None:
    """Add ``/ui``, its files below that, and ``/ui/events``.

    The files are read here and now: what a request names is never looked for on the disk. They tell nothing about
    anybody, so they need no API key; ``/ui/events`` shows what others have asked, so it must need the key if there is
    one.
    """
    for file in files("minisgl.server").joinpath("ui").iterdir():
        path = "/ui" if file.name == "index.html" else f"/ui/{file.name}"
        kind = _MEDIA_TYPES[file.name.rpartition(".")[2]]
        app.add_api_route(path, _serve(file.read_bytes(), kind), methods=["GET", "HEAD"], include_in_schema=False)
    spelled = Spelled(engine.tokenizer)

    @app.get("/ui/events", include_in_schema=False)
    async def events() -> Response:
        return LiveStream(engine.watch(), spelled)


def _serve(content: bytes, media_type: str) -> Any:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file


class LiveStream(StreamingResponse):
    """States as server-sent events, until the client leaves or the engine ends.

    Args:
        states: from the engine.
        spelled: writes them.
    """

    def __init__(self, states: AsyncGenerator[LiveState, None], spelled: Spelled) -> None:
        self._events = _events(states, spelled)
        super().__init__(self._events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream (ASGI). The watcher is gone from the engine when this returns."""
        async with aclosing(self._events):
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self.stream_response(send))


async def _events(states: AsyncGenerator[LiveState, None], spelled: Spelled) -> AsyncGenerator[bytes, None]:
    async with aclosing(states):
        try:
            async for state in states:
                yield event(spelled.json(state))
        except MiniSGLError as error:  # the status has left already: an event must tell
            yield event(to_json(as_api_error(error).body()))
