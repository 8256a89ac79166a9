"""The live page: its files, and the engine's states as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from functools import lru_cache
from importlib.resources import files
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.responses import Response
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from minisgl.errors import MiniSGLError
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.errors import as_api_error, to_json
from minisgl.server.live.state import LiveState
from minisgl.server.streaming import event, until_disconnect
from minisgl.tokenizer import Tokenizer

_CACHED_TEXTS = 4096  # the next state has most of a state's texts again
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
# Nothing from other hosts, nothing inline: the page shows text that any client may have sent.
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_live_page(app: FastAPI, engine: AsyncEngine) -> None:
    """Add ``/ui``, its files below that, which are read once, and ``/ui/events``.

    The files need no API key; ``/ui/events`` shows other clients' requests, so it needs the key if there is one.
    """
    for file in files("minisgl.server").joinpath("ui").iterdir():
        path = "/ui" if file.name == "index.html" else f"/ui/{file.name}"
        kind = _MEDIA_TYPES[file.name.rpartition(".")[2]]
        app.add_api_route(path, _serve(file.read_bytes(), kind), methods=["GET", "HEAD"], include_in_schema=False)
    encoder = StateEncoder(engine.tokenizer)

    @app.get("/ui/events", include_in_schema=False)
    async def events() -> Response:
        return LiveStream(engine.watch(), encoder)


def _serve(content: bytes, media_type: str) -> Any:
    async def file() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return file


class StateEncoder:
    """Writes states as JSON, each once for all watchers, with text for token ids (or the ids without a tokenizer)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._cached_text = lru_cache(_CACHED_TEXTS)(self._text)
        self._state: LiveState | None = None
        self._json = b""

    def json(self, state: LiveState) -> bytes:
        """The state with its texts, in one line."""
        if state is not self._state:
            for node in state.nodes:
                node.text = self._cached_text(tuple(node.head))
            for request in state.requests:
                request.text = self._cached_text(tuple(request.tail))
            self._state, self._json = state, msgspec.json.encode(state)
        return self._json

    def _text(self, token_ids: tuple[int, ...]) -> str:
        if not self._tokenizer.available:
            return " ".join(map(str, token_ids))
        return self._tokenizer.spell(token_ids)


class LiveStream(StreamingResponse):
    """States as server-sent events, until the client leaves or the engine ends."""

    def __init__(self, states: AsyncGenerator[LiveState, None], encoder: StateEncoder) -> None:
        self._events = _events(states, encoder)
        super().__init__(self._events, headers={"Cache-Control": "no-cache"}, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self._events):  # so that the engine is not watched any more when this returns
            with suppress(ClientDisconnect):
                await until_disconnect(receive, self.stream_response(send))


async def _events(states: AsyncGenerator[LiveState, None], encoder: StateEncoder) -> AsyncGenerator[bytes, None]:
    async with aclosing(states):
        try:
            async for state in states:
                yield event(encoder.json(state))
        except MiniSGLError as error:  # the status has been sent already: an event reports the error
            yield event(to_json(as_api_error(error).body()))
