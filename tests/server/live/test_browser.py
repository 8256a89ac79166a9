"""The live page in a real browser, beside a real server."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.types import ASGIApp, Receive, Scope, Send

from tests.browser import Browser, browser
from tests.server.harness import RunningServer, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.needs("chromium", "websocket")]

SHARED = "the cat and the dog, 12 of them, and one more of each"
ATTACK = "<img src=x onerror=\"document.title='stolen'\"><script>document.title='stolen'</script>"
FIGURES = "Object.fromEntries([...document.querySelectorAll('#numbers div')].map(it => it.innerText.split('\\n')))"
PAGES = "Object.fromEntries([...document.querySelectorAll('#pool .key')].map(it => it.innerText.split(/ (?=\\d)/)))"
NODES = "[...document.querySelectorAll('.node')].map(it => it.ariaLabel)"
ROWS = "[...document.querySelectorAll('#batch tbody tr')]"
ANSWERS = "[...document.querySelectorAll('.answer')].map(it => it.innerText)"


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium"), width=1280, height=800) as opened:
        yield opened


@pytest.fixture
def live(checkpoint: Path) -> Iterator[RunningServer]:
    with RunningServer(checkpoint, num_pages=128) as running:
        yield running


@pytest.fixture
def page(live: RunningServer, chromium: Browser) -> Iterator[Browser]:
    chromium.problems.clear()
    chromium.requested.clear()
    chromium.open(f"{live.url}/ui")
    chromium.wait_for("document.querySelector('#numbers dd')")
    yield chromium
    assert chromium.problems == []
    assert [url for url in chromium.requested if not url.startswith(f"{live.url}/")] == []
    chromium.open("about:blank#")  # the next server may have this one's port, so the page must not call again


def say(page: Browser, text: str) -> None:
    page.evaluate("document.querySelector('#message').focus()")
    page.call("Input.insertText", text=text)
    page.press("Enter", 13)


def start_class(page: Browser, students: int) -> None:
    page.evaluate(f"document.querySelector('#text').value = {SHARED!r}")
    page.evaluate(f"document.querySelector('#students').value = {students}")
    page.click("#class button")


def test_a_question_takes_pages_becomes_an_answer_and_stays_in_the_tree(live: RunningServer, page: Browser) -> None:
    assert page.evaluate(PAGES) == {"free": "128", "private": "0", "cached, read": "0", "cached, idle": "0"}
    live.gate.allowed = 3
    say(page, "how are you?")
    page.wait_for(f"{FIGURES}.running === '1'")
    assert int(page.evaluate(PAGES)["private"]) > 0
    assert int(page.evaluate(PAGES)["cached, read"]) > 0
    assert page.evaluate("document.querySelector('#batch tbody tr').className") == "decode focused"
    assert page.evaluate("document.querySelector('.node').className") == "node locked path"
    assert page.evaluate("document.querySelector('.question').innerText") == "r0how are you?"
    live.gate.allowed = None
    page.wait_for("document.querySelector('.answer:not(.growing)')")
    page.wait_for(f"{FIGURES}.running === '0' && document.querySelector('#batch tr.ended')")
    assert len(page.evaluate(ANSWERS)[0]) > 10
    pages = page.evaluate(PAGES)
    assert (pages["private"], pages["cached, read"]) == ("0", "0")
    assert int(pages["cached, idle"]) == live.core.scheduler.memory.cache.num_pages > 0
    assert "how are you?" in page.evaluate(NODES)[0].replace(" ↵", "")


def test_a_second_message_goes_on_with_the_conversation_and_another_chat_does_not(
    live: RunningServer, page: Browser
) -> None:
    for text in ("one", "two"):
        say(page, text)
        page.wait_for("!document.querySelector('.growing')")
    page.click("#fresh")
    say(page, "three")
    page.wait_for("document.querySelectorAll('.answer').length === 3 && !document.querySelector('.growing')")
    assert page.evaluate("[...document.querySelectorAll('article')].map(it => it.children.length)") == [4, 2]
    first, second, third = (int(request["prompt"]) for request in requests(page))
    assert second > first + 64, "the first answer is part of the second prompt"
    assert third < second


def requests(page: Browser) -> list[dict[str, Any]]:
    row = "{uid: Number(it.dataset.uid), prompt: parseInt(it.children[2].innerText)}"
    return sorted(page.evaluate(f"{ROWS}.map(it => ({row}))"), key=lambda row: int(row["uid"]))


def test_a_class_shares_one_node(live: RunningServer, page: Browser) -> None:
    live.gate.allowed = 4
    start_class(page, 3)
    page.wait_for(f"{FIGURES}.running === '3'")
    page.wait_for("[...document.querySelectorAll('.node b')].some(it => it.innerText.endsWith('3×'))")
    shared = [label for label in page.evaluate(NODES) if "locked by 3 requests" in label]
    assert len(shared) == 1
    assert "the cat and the dog" in shared[0]
    assert page.evaluate("[...document.querySelectorAll('.tag')].map(it => it.innerText).sort()").count("r2") == 2
    live.gate.allowed = None
    page.wait_for("document.querySelectorAll('.answer:not(.growing)').length === 3")
    assert all(page.evaluate(ANSWERS))
    page.wait_for(f"{FIGURES}['of prompts cached'] !== '0 %'")


def test_stop_ends_what_runs(live: RunningServer, page: Browser) -> None:
    live.gate.allowed = 2
    start_class(page, 2)
    page.wait_for(f"{FIGURES}.running === '2'")
    page.click("#stop")
    page.wait_for("!document.querySelector('.growing')")
    live.gate.allowed = None
    wait_until(live.idle)
    assert [answer.endswith("(stopped)") for answer in page.evaluate(ANSWERS)] == [True, True]


def test_what_the_server_refuses_is_said_and_the_chat_goes_on(live: RunningServer, page: Browser) -> None:
    say(page, "word " * 600)
    page.wait_for("document.querySelector('.answer em')")
    assert "512" in page.evaluate(ANSWERS)[0]
    say(page, "hello")
    page.wait_for("document.querySelectorAll('.answer:not(.growing)').length === 2")
    assert len(page.evaluate(ANSWERS)[1]) > 10
    page.problems[:] = [problem for problem in page.problems if "status of 400" not in problem]


def test_markup_in_a_prompt_is_text(live: RunningServer, page: Browser) -> None:
    say(page, ATTACK)
    live.complete(prompt=ATTACK, max_tokens=4, user=ATTACK)
    page.wait_for("document.querySelectorAll('#batch tbody tr').length === 2 && !document.querySelector('.growing')")
    assert ATTACK in page.evaluate("document.querySelector('.question').innerText")
    assert any("<img src=x" in label for label in page.evaluate(NODES))
    assert page.evaluate("document.querySelectorAll('img, body script').length") == 0
    assert page.evaluate("document.title") == "minisgl, live"


def test_a_pause_stops_the_picture_and_not_the_engine(live: RunningServer, page: Browser) -> None:
    page.evaluate("document.activeElement.blur()")
    page.press("p", 80)
    page.wait_for("document.querySelector('#pause').innerText === 'Go on'")
    live.chat()
    page.wait_for("parseFloat(document.querySelector('#ago').innerText.slice(1)) > 0.5")
    assert page.evaluate(FIGURES)["pages in use"] == "0 / 128"
    assert page.evaluate(NODES) == []
    page.click("#pause")
    page.evaluate("document.querySelector('#speed').value")
    page.evaluate("(it => { it.value = 1; it.dispatchEvent(new Event('change')); })(document.querySelector('#speed'))")
    page.wait_for(f"{NODES}.length > 0")
    move(page, "#moment", -60, "input")
    page.wait_for(f"{NODES}.length === 0")


def test_slow_motion_replays_what_has_been(live: RunningServer, page: Browser) -> None:
    move(page, "#speed", 0.1, "change")
    live.chat()
    page.wait_for("parseFloat(document.querySelector('#ago').innerText.slice(1)) > 0.5")
    assert page.evaluate("document.querySelector('#pause').innerText") == "Pause"
    assert page.evaluate(NODES) == []
    move(page, "#speed", 1, "change")
    page.wait_for(f"{NODES}.length > 0 && document.querySelector('#ago').innerText === 'now'")


def move(page: Browser, control: str, value: float, event: str) -> None:
    script = f"(it => {{ it.value = {value}; it.dispatchEvent(new Event('{event}')); }})"
    page.evaluate(f"{script}(document.querySelector('{control}'))")


def test_the_keyboard_walks_through_the_tree(live: RunningServer, page: Browser) -> None:
    for ending in ("cats", "dogs", "foxes"):
        live.complete(prompt=f"{SHARED}: {ending}, all of them", max_tokens=1)
    page.wait_for(f"{NODES}.length > 3")
    print(page.evaluate(NODES))
    assert page.evaluate("document.querySelectorAll('.node[tabindex=\"0\"]').length") == 1
    page.evaluate("document.querySelector('.node[tabindex=\"0\"]').focus()")
    focused = "document.activeElement.ariaLabel"
    root = page.evaluate(focused)
    page.press("ArrowRight", 39)
    first = page.evaluate(focused)
    page.press("ArrowDown", 40)
    assert len({root, first, page.evaluate(focused)}) == 3
    assert "tokens in" in page.evaluate("document.querySelector('#tip').innerText")
    page.press("ArrowLeft", 37)
    assert page.evaluate(focused) == root


class KeyWall:
    """Lets nobody in without the key, except to the page's own files."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        needs_key = scope["type"] == "http" and (scope["path"].startswith("/v1") or scope["path"] == "/ui/events")
        if needs_key and (b"authorization", b"Bearer open sesame") not in scope["headers"]:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "no key"}}'})
            return
        await self.app(scope, receive, send)


def test_the_page_asks_for_the_key_and_keeps_it_in_memory(checkpoint: Path, chromium: Browser) -> None:
    server = RunningServer(checkpoint)
    server.server.config.app = KeyWall(server.server.config.app)
    with server:
        chromium.open(f"{server.url}/ui")
        for key in ("a wrong one", "open sesame"):
            chromium.wait_for("!document.querySelector('#key').hidden")
            chromium.evaluate(f"document.querySelector('#secret').value = {key!r}")
            chromium.click("#key button")
        chromium.wait_for("document.querySelector('#numbers dd')")
        assert chromium.evaluate("document.querySelector('#key').hidden")
        say(chromium, "hello")
        chromium.wait_for("document.querySelector('.answer:not(.growing)')")
        assert chromium.evaluate("document.cookie + localStorage.length + sessionStorage.length") == "00"
        assert "sesame" not in chromium.evaluate("document.documentElement.outerHTML + location.href")
        chromium.open("about:blank#")


def test_the_hit_rate_of_a_page_store_is_a_figure(checkpoint: Path, chromium: Browser) -> None:
    with RunningServer(checkpoint, num_pages=32, page_store="host") as server:
        for text in "aba":
            server.complete(prompt=text * 100, max_tokens=1)
        chromium.open(f"{server.url}/ui")
        chromium.wait_for("document.querySelector('#numbers dd')")
        share = chromium.evaluate(FIGURES)["of the rest in the store"]
        assert 0 < int(share.removesuffix(" %")) < 100
        chromium.open("about:blank#")


def test_the_page_says_when_the_engine_is_gone(checkpoint: Path, chromium: Browser) -> None:
    with RunningServer(checkpoint) as server:
        chromium.open(f"{server.url}/ui")
        chromium.wait_for("document.querySelector('#numbers dd')")
        server.gate.error = RuntimeError("the device is gone")
        say(chromium, "hello")
        chromium.wait_for("document.querySelector('#status').innerText.includes('engine died')")
        chromium.wait_for("document.querySelector('.answer em')")
        chromium.open("about:blank#")


@pytest.mark.parametrize(("width", "height"), [(1280, 800), (1920, 1080)])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_panels_fit_the_screen(live: RunningServer, page: Browser, width: int, height: int, scheme: str) -> None:
    page.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    start_class(page, 12)
    page.wait_for("document.querySelectorAll('.answer:not(.growing)').length === 12")
    root = "document.documentElement"
    assert page.evaluate(f"[{root}.scrollWidth, {root}.scrollHeight]") == [width, height]
    sizes = page.evaluate(
        "[...document.querySelectorAll('.picture')].map(it => Math.min(it.clientWidth, it.clientHeight))"
    )
    assert min(sizes) > 100
    assert page.evaluate("parseFloat(getComputedStyle(document.querySelector('.caption')).fontSize)") >= 11
    page.call("Emulation.clearDeviceMetricsOverride")
    page.call("Emulation.setEmulatedMedia", features=[])
