from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from minisgl import LLM
from minisgl.chat.engine import EnginePartner
from minisgl.chat.partner import NoAnswer, NoServer, Partner
from minisgl.chat.server import ServerPartner
from minisgl.errors import InvalidRequest
from tests.server.harness import RunningServer, wait_until
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

HELLO = [{"role": "user", "content": "the quick brown fox"}]


def whole(partner: Partner, messages: list[dict[str, str]]) -> tuple[str, str]:
    """Text and finish reason of an answer."""
    text, answer = "", partner.answer(messages)
    while True:
        try:
            text += next(answer)
        except StopIteration as end:
            return text, end.value


@contextmanager
def canned(status: int, body: str) -> Iterator[str]:
    """A server that lists one model and says the same to all else; yields its address."""

    class Handler(BaseHTTPRequestHandler):
        def _send(self, status: int, body: str) -> None:
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body.encode())

        def do_GET(self) -> None:
            self._send(200, '{"data": [{"id": "canned"}]}')

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self._send(status, body)

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join(timeout=10)
    server.server_close()


def test_a_server_answers_as_it_does_to_others(server: RunningServer) -> None:
    partner = ServerPartner(f"{server.url}/v1/", None)
    text, reason = whole(partner, HELLO)
    assert reason in ("stop", "length")
    assert text
    assert partner.name == f"{server.model} at {server.url}"


def test_leaving_an_answer_ends_it_on_the_server(server: RunningServer) -> None:
    server.gate.allowed = 3
    answer = ServerPartner(server.url, None).answer(HELLO)
    next(answer)
    answer.close()
    wait_until(lambda: not server.core.scheduler.requests)
    server.gate.allowed = None


def interrupted(answer: Iterator[str], after: int) -> bool:
    """Whether the first piece of an answer took more than ``after`` lines of Python, when an interrupt came."""
    left = after

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0:
            sys.settrace(None)
            raise KeyboardInterrupt
        return trace

    usual = sys.gettrace()
    sys.settrace(trace)
    try:
        next(answer)
        return False
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(usual)


def test_wherever_an_interrupt_comes_the_server_hears_that_nobody_reads_any_more(server: RunningServer) -> None:
    partner = ServerPartner(server.url, None)
    for after in itertools.count(0, 120):
        server.gate.allowed = 1
        if not interrupted(partner.answer(HELLO), after):
            break
        wait_until(lambda: not server.engine.busy)
    assert after > 2000
    wait_until(lambda: not server.core.scheduler.requests)
    server.gate.allowed = None


def test_what_a_server_refuses_is_told_in_its_words(server: RunningServer) -> None:
    with pytest.raises(NoAnswer, match=r"the server refuses: .*512"):
        whole(ServerPartner(server.url, None), [{"role": "user", "content": "word " * 600}])


def test_a_server_that_died_is_told_from_one_that_refuses(own_server: RunningServer) -> None:
    partner = ServerPartner(own_server.url, None)
    own_server.gate.error = RuntimeError("the device is gone")
    with pytest.raises(NoAnswer, match="the device is gone"):
        whole(partner, HELLO)


def test_nobody_listens() -> None:
    with pytest.raises(NoServer, match=r"no server answers at http://127.0.0.1:9; start one with"):
        ServerPartner("http://127.0.0.1:9", None)


@pytest.mark.parametrize("url", ["nonsense", "http://[", "ftp://127.0.0.1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(NoAnswer):
        ServerPartner(url, None)


@pytest.mark.parametrize(
    ("status", "body", "message"),
    [
        (401, "", "MINISGL_API_KEY"),
        (503, '{"error": {"message": "the queue is full"}}', "refuses: the queue is full"),
        (500, "<html>", "refuses: status 500"),
        (200, 'data: {"choices": [{"delta": {"content": "a"}, "finish_reason": null}]}\n\n', "went away in the middle"),
        (200, 'data: {"error": {"message": "the engine died"}}\n\n', "the engine died"),
        (200, 'data: {"something": "else"}\n\n', "does not speak"),
        (200, "data: no json\n\n", "does not speak"),
    ],
)
def test_every_kind_of_failure_has_its_words(status: int, body: str, message: str) -> None:
    with canned(status, body) as url, pytest.raises(NoAnswer, match=message):
        whole(ServerPartner(url, None), HELLO)


def test_a_line_separator_in_an_answer_is_a_part_of_it() -> None:
    chunk = '{"choices": [{"delta": {"content": "a\u2028b\u0085c"}, "finish_reason": "stop"}]}'
    with canned(200, f"data: {chunk}\n\ndata: [DONE]\n\n") as url:
        assert whole(ServerPartner(url, None), HELLO) == ("a\u2028b\u0085c", "stop")


def test_an_engine_of_ones_own_answers_like_a_server(tmp_path: Path) -> None:
    partner = EnginePartner(str(text_checkpoint(tmp_path, max_position_embeddings=64)))
    text, reason = whole(partner, HELLO)
    assert text
    assert reason in ("stop", "length")
    answer = partner.answer(HELLO)
    next(answer)
    answer.close()
    llm: LLM = partner._llm
    assert_idle_and_clean(llm)
    with pytest.raises(InvalidRequest, match="64"):
        whole(partner, [{"role": "user", "content": "word " * 600}])
