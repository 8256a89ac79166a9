"""The live page's routes, by HTTP."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Iterator
from contextlib import aclosing
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message

from minisgl.errors import EngineDead
from minisgl.server.config import ServerConfig
from minisgl.server.live import state as live_state
from minisgl.server.live.page import LiveStream, StateEncoder
from minisgl.server.live.state import LiveFeed, LiveState
from minisgl.tokenizer import Tokenizer
from tests.server.harness import RunningServer, in_background, wait_until
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
    monkeypatch.setattr(live_state, "PERIOD", 0.001)


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

    async def test() -> None:
        loop = asyncio.get_running_loop()

        async def note(seconds: float) -> None:
            if asyncio.get_running_loop() is not loop:  # a server that an earlier test left to the module's fixtures
                return await sleep(seconds)
            pauses.append(seconds)
            await sleep(0)

        engine = Engine(cost=0.5)
        async with aclosing(engine.feed.states()) as states:
            monkeypatch.setattr(asyncio, "sleep", note)
            await anext(states)
            await anext(states)

    run(test())
    assert set(pauses) == {0.5 / live_state.SHARE}


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


UI = files("minisgl.server") / "ui"
NAMES = sorted(file.name for file in UI.iterdir() if file.name != "index.html")


def states(server: RunningServer) -> Iterator[dict[str, Any]]:
    with server.http.stream("GET", "/ui/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        rest = b""
        for piece in response.iter_bytes():
            *events, rest = (rest + piece).split(b"\n\n")
            yield from (json.loads(event.removeprefix(b"data: ")) for event in events)


def watchers(server: RunningServer) -> int:
    return server.engine._feed._watchers


@pytest.mark.parametrize("path", ["/ui", *(f"/ui/{name}" for name in NAMES)])
def test_files_are_served_as_they_are_and_may_load_nothing_from_elsewhere(server: RunningServer, path: str) -> None:
    answer = server.http.get(path)
    name = path.removeprefix("/ui").removeprefix("/") or "index.html"
    assert (answer.status_code, answer.content) == (200, (UI / name).read_bytes())
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert server.http.head(path).status_code == 200


@pytest.mark.parametrize("path", ["/ui/nothing.js", "/ui/../app.py", "/ui/%2e%2e/app.py", "/ui/index.html/x"])
def test_nothing_else_is_served(server: RunningServer, path: str) -> None:
    assert server.http.get(path).status_code == 404


def test_a_server_without_the_page_has_nothing_of_it(checkpoint: Path) -> None:
    with RunningServer(checkpoint, ServerConfig(live_page=False)) as server:
        for path in ("/ui", "/ui/main.js", "/ui/events"):
            assert server.http.get(path).status_code == 404
        assert server.chat(max_tokens=1).choices


def test_what_others_ask_is_shown_to_who_knows_the_key(checkpoint: Path) -> None:
    with RunningServer(checkpoint, ServerConfig(api_key="a-secret-key")) as server:
        assert server.http.get("/ui").status_code == 200
        for headers in ({}, {"Authorization": "Bearer another"}):
            reply = server.http.get("/ui/events", headers=headers)
            assert (reply.status_code, reply.json()["error"]["code"]) == (401, "invalid_api_key")
        server.http.headers["Authorization"] = "Bearer a-secret-key"
        assert next(states(server))["num_pages"] == 64


@pytest.mark.parametrize("name", ["index.html", *NAMES])
def test_the_files_write_no_markup_and_name_no_other_server(name: str) -> None:
    text = (UI / name).read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b|new Function|https?://", text)
    assert not re.search(r"\sstyle=|\son\w+=|<script>|<style", text), "the page's policy forbids what is inline"
    assert len(text.splitlines()) < 250


def test_the_routes_are_no_part_of_the_api(server: RunningServer) -> None:
    assert not [path for path in server.http.get("/openapi.json").json()["paths"] if path.startswith("/ui")]


def test_a_watcher_sees_a_request_run(server: RunningServer) -> None:
    server.gate.allowed = 0
    result = in_background(lambda: server.chat(user="ada"))
    wait_until(lambda: bool(server.core.scheduler.requests))
    seen: list[dict[str, Any]] = []
    for state in states(server):
        seen.append(state)
        server.gate.allowed = None
        if [r for r in state["requests"] if r["user"] == "ada" and r["state"] == "finished"]:
            break
    result()
    (request,) = (r for r in seen[-1]["requests"] if r["user"] == "ada")
    assert request["generated"] == 24
    assert [node for node in seen[-1]["nodes"] if "the quick brown fox" in node["text"]]
    assert seen[-1]["slices"][-1]["decode"] > 0
    wait_until(lambda: watchers(server) == 0)


@pytest.mark.parametrize("prompt", ["<img src=x onerror=1>", '\n\ndata: {"error": 1}\n\n', "\u2028</script>"])
def test_text_is_data_whatever_it_says(server: RunningServer, prompt: str) -> None:
    server.gate.allowed = 0
    result = in_background(lambda: server.complete(prompt=prompt, max_tokens=1))
    wait_until(lambda: bool(server.core.scheduler.requests))
    state = next(states(server))
    server.gate.allowed = None
    result()
    (request,) = (request for request in state["requests"] if request["state"] == "waiting")
    assert request["text"].removeprefix("<s>") == prompt


def test_the_stream_tells_of_the_engines_death(own_server: RunningServer) -> None:
    stream = states(own_server)
    assert "nodes" in next(stream)
    own_server.gate.error = RuntimeError("the device is gone")
    in_background(own_server.chat)
    last = list(stream)[-1]
    assert last["error"]["code"] == "engine_dead"
    assert "the device is gone" in last["error"]["message"]


def test_a_stop_ends_the_stream(checkpoint: Path) -> None:
    with RunningServer(checkpoint) as server:
        stream = states(server)
        next(stream)
        server.server.should_exit = True
        assert "shutting down" in list(stream)[-1]["error"]["message"]


class Nothing(Tokenizer):
    """The tokenizer of a checkpoint that has none."""

    available = False

    def __init__(self) -> None:
        pass


def test_a_model_without_a_tokenizer_shows_its_tokens() -> None:
    assert StateEncoder(Nothing())._text((5, 6)) == "5 6"


def test_a_client_that_reads_nothing_and_leaves_is_forgotten_at_once() -> None:
    async def look() -> LiveState:
        return empty_state(1)

    async def test() -> None:
        feed = LiveFeed(look)
        sending, leaving = asyncio.Event(), asyncio.Event()

        async def send(message: Message) -> None:
            if message.get("body"):
                sending.set()
                await asyncio.Event().wait()

        async def receive() -> Message:
            await leaving.wait()
            return {"type": "http.disconnect"}

        stream = LiveStream(feed.states(), StateEncoder(Nothing()))
        answering = asyncio.ensure_future(stream({"type": "http"}, receive, send))
        await sending.wait()
        assert feed._watchers == 1
        leaving.set()
        await answering
        assert feed._watchers == 0

    asyncio.run(asyncio.wait_for(test(), 20))
