from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import aclosing

import pytest

from minisgl.errors import EngineDead
from minisgl.server.live import feed
from minisgl.server.live.feed import LiveFeed
from minisgl.server.live.state import LiveState
from tests.server.live.states import empty_state


class Engine:
    """Answers every question at once, with states numbered from 1."""

    def __init__(self, cost: float = 0.0) -> None:
        self.asked = 0
        self.cost = cost
        self.error: EngineDead | None = None
        self.feed = LiveFeed(self._ask)

    async def _ask(self) -> LiveState:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return empty_state(self.asked, self.cost)


@pytest.fixture(autouse=True)
def _in_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD", 0.001)


def run(test: Coroutine[object, object, None]) -> None:
    asyncio.run(asyncio.wait_for(test, 20))


def test_the_engine_is_asked_while_somebody_watches_and_not_else() -> None:
    async def test() -> None:
        engine = Engine()
        await asyncio.sleep(0.02)
        assert engine.asked == 0
        async with aclosing(engine.feed.states()) as states:
            assert [(await anext(states)).time for _ in range(3)] == [1, 2, 3]
        asked = engine.asked
        await asyncio.sleep(0.02)
        assert engine.asked == asked

    run(test())


def test_watchers_share_the_answers() -> None:
    async def test() -> None:
        engine = Engine()
        seen = []

        async def watch() -> None:
            async with aclosing(engine.feed.states()) as states:
                seen.append([(await anext(states)).time for _ in range(5)])

        await asyncio.gather(*(watch() for _ in range(20)))
        assert seen == [[1, 2, 3, 4, 5]] * 20
        assert engine.asked <= 6

    run(test())


def test_a_slow_watcher_gets_the_newest_state_and_no_backlog() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feed.states()) as states:
            await anext(states)
            while engine.asked < 30:
                await asyncio.sleep(0.001)
            assert (await anext(states)).time >= 29
            assert (await anext(states)).time <= engine.asked

    run(test())


def test_whoever_comes_later_is_not_shown_the_past() -> None:
    async def test() -> None:
        engine = Engine()
        async with aclosing(engine.feed.states()) as states:
            await anext(states)
        asked = engine.asked
        async with aclosing(engine.feed.states()) as states:
            assert (await anext(states)).time > asked

    run(test())


def test_an_expensive_look_is_taken_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    sleep = asyncio.sleep

    async def note(seconds: float) -> None:
        pauses.append(seconds)
        await sleep(0)

    async def test() -> None:
        engine = Engine(cost=0.5)
        async with aclosing(engine.feed.states()) as states:
            monkeypatch.setattr(asyncio, "sleep", note)
            await anext(states)
            await anext(states)

    run(test())
    assert set(pauses) == {0.5 / feed.SHARE}


def test_an_error_reaches_all_who_wait_and_whoever_comes_later_asks_again() -> None:
    async def test() -> None:
        engine = Engine()
        engine.error = EngineDead("gone")
        waiting = [asyncio.ensure_future(anext(engine.feed.states())) for _ in range(3)]
        for each in (*waiting, anext(engine.feed.states())):
            with pytest.raises(EngineDead, match="gone"):
                await each
        engine.error = None
        asked = engine.asked
        async with aclosing(engine.feed.states()) as states:
            assert (await anext(states)).time == asked + 1

    run(test())
