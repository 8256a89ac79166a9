"""The engine's state for any number of watchers: asked for once, and only while there are any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from minisgl.errors import MiniSGLError
from minisgl.server.live.state import LiveState

PERIOD = 0.1
"""Seconds between two looks at the engine, or more."""
SHARE = 0.05
"""Most of its time that the engine spends on being looked at."""


class LiveFeed:
    """Hands on the newest state. Belongs to one event loop.

    Args:
        ask: gets a state from the engine; a `MiniSGLError` that it raises goes to all who watch.
    """

    def __init__(self, ask: Callable[[], Awaitable[LiveState]]) -> None:
        self._ask = ask
        self._watchers = 0
        self._asking: asyncio.Task[None] | None = None
        self._state: LiveState | None = None
        self._error: MiniSGLError | None = None
        self._news = asyncio.Event()

    async def states(self) -> AsyncGenerator[LiveState, None]:
        """States as they come. Whoever is slow misses some, and then gets the newest.

        Raises:
            EngineDead: the engine died, or is shutting down.
        """
        seen = None
        self._enter()
        try:
            while self._error is None:
                if self._state is None or self._state is seen:
                    await self._news.wait()
                else:
                    seen = self._state
                    yield seen
            raise self._error
        finally:
            self._leave()

    def _enter(self) -> None:
        self._watchers += 1
        if self._asking is None:
            self._error = None
            self._asking = asyncio.create_task(self._keep_asking())

    def _leave(self) -> None:
        self._watchers -= 1
        if self._watchers == 0 and self._asking is not None:
            self._asking.cancel()
            self._asking = self._state = None

    async def _keep_asking(self) -> None:
        try:
            while True:
                self._state = await self._ask()
                self._tell()
                await asyncio.sleep(max(PERIOD, self._state.cost / SHARE))
        except MiniSGLError as error:
            self._error = error
            self._asking = self._state = None  # whoever comes next begins anew: the engine may have been restarted
            self._tell()

    def _tell(self) -> None:
        self._news.set()
        self._news = asyncio.Event()
