"""Chatting: the session and its commands, interrupts, and partners that answer from an engine or a server."""

from __future__ import annotations

import io
import itertools
import linecache
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from minisgl.batch import Batch, StepPhase
from minisgl.chat import (
    ChatPartner,
    ChatSession,
    DeferredInterrupt,
    EnginePartner,
    History,
    NoAnswer,
    NoServer,
    ServerPartner,
    printable,
)
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM
from minisgl.request import Request
from tests.server.harness import RunningServer, wait_until
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint


class Parrot:
    """Answers every message by counting it, and does what else a test asks for.

    Args:
        trouble: raised in the middle of the answer to the message of that text.
    """

    name = "a parrot"

    def __init__(self, trouble: BaseException | None = None, reason: str = "stop") -> None:
        self.trouble = trouble
        self.reason = reason
        self.heard: list[History] = []
        self.closed = 0

    def answer(self, messages: History) -> Generator[str, None, str]:
        self.heard.append(messages)
        try:
            yield "answer "
            if messages[-1]["content"] == "trouble" and self.trouble is not None:
                raise self.trouble
            yield str(len(self.heard))
            return self.reason
        finally:
            self.closed += 1


def run(partner: Parrot, lines: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
    ChatSession(partner).run()


def said(messages: History) -> list[str]:
    return [message["content"] for message in messages]


def test_the_whole_conversation_is_sent_until_it_is_reset(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    run(parrot, ["one", "", "two", "/reset", "three"], monkeypatch)
    assert [said(messages) for messages in parrot.heard] == [["one"], ["one", "answer 1", "two"], ["three"]]
    assert [message["role"] for message in parrot.heard[1]] == ["user", "assistant", "user"]
    assert capsys.readouterr().out.splitlines() == ["answer 1", "answer 2", "(a new conversation)", "answer 3"]


def test_the_system_prompt_comes_first_and_outlives_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot()
    run(parrot, ["one", "/system Be brief. ", "two", "/reset", "three", "/system", "four"], monkeypatch)
    assert [said(messages) for messages in parrot.heard] == [
        ["one"],
        ["Be brief.", "one", "answer 1", "two"],
        ["Be brief.", "three"],
        ["three", "answer 3", "four"],
    ]
    assert parrot.heard[1][0]["role"] == "system"


@pytest.mark.parametrize("command", ["/help", "/resett", "/reset now", "/"])
def test_an_unknown_command_shows_those_there_are(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot()
    run(parrot, [command], monkeypatch)
    assert parrot.heard == []
    assert "/system TEXT" in capsys.readouterr().out


def test_exit_ends_the_session_before_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    parrot = Parrot()
    run(parrot, ["/exit", "one"], monkeypatch)
    assert parrot.heard == []


def test_an_error_is_shown_and_forgotten(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    parrot = Parrot(NoAnswer("the context is full\x1b[2J"))
    run(parrot, ["one", "trouble", "two"], monkeypatch)
    assert said(parrot.heard[2]) == ["one", "answer 1", "two"]
    assert "error: the context is full�[2J" in capsys.readouterr().out


def test_an_interrupt_ends_the_answer_and_what_there_is_of_it_is_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    parrot = Parrot(KeyboardInterrupt())
    run(parrot, ["trouble", "two"], monkeypatch)
    assert said(parrot.heard[1]) == ["trouble", "answer ", "two"]
    assert "(stopped)" in capsys.readouterr().out
    assert parrot.closed == 2


def test_an_interrupt_at_the_prompt_is_no_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = iter([KeyboardInterrupt(), "one", EOFError()])

    def next_line(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("minisgl.chat._read", next_line)
    parrot = Parrot()
    ChatSession(parrot).run()
    assert said(parrot.heard[0]) == ["one"]
    assert "/exit" in capsys.readouterr().out


def test_a_full_context_is_said(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run(Parrot(reason="length"), ["one"], monkeypatch)
    assert "the context is full; /reset" in capsys.readouterr().out


def test_an_answer_cannot_command_the_terminal() -> None:
    assert printable("naïve 日本 🙂\n\tok") == "naïve 日本 🙂\n\tok"
    assert printable("a\x1b]0;title\x07b\r\x9bc\u202e") == "a�]0;title�b��c�"


HELLO = [{"role": "user", "content": "the quick brown fox"}]


def press_ctrl_c() -> None:
    os.kill(os.getpid(), signal.SIGINT)


class Interrupting:
    """Presses Ctrl-C within the first step that it observes."""

    pressed = False

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        if not self.pressed:
            self.pressed = True
            press_ctrl_c()

    def end(self, phase: StepPhase, batch: Batch | None) -> None: ...

    def finish(self, requests: Sequence[Request]) -> None: ...


def test_the_first_waits_and_the_second_does_not() -> None:
    with DeferredInterrupt() as interrupt:
        interrupt.raise_pending()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            interrupt.raise_pending()
        interrupt.raise_pending()
        press_ctrl_c()
        with pytest.raises(KeyboardInterrupt):
            press_ctrl_c()


def test_afterwards_all_is_as_usual() -> None:
    usual = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="trouble"), DeferredInterrupt():
        raise ValueError("trouble")
    assert signal.getsignal(signal.SIGINT) is usual


def test_an_interrupt_within_a_step_leaves_the_prefix_cache_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    partner = EnginePartner(str(text_checkpoint(tmp_path)))
    llm = partner._llm
    first: Generator[str, None, str] = partner.answer(HELLO)
    next(first)
    first.close()
    cached = llm.scheduler.memory.cache.num_pages
    assert cached > 0
    with llm.core.observe(Interrupting()), pytest.raises(KeyboardInterrupt):
        list(partner.answer(HELLO))
    assert llm.scheduler.memory.cache.num_pages >= cached
    assert_idle_and_clean(llm)


def whole(partner: ChatPartner, messages: list[dict[str, str]]) -> tuple[str, str]:
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


def takes_or_leaves_a_lock(frame: FrameType) -> bool:
    code = frame.f_code
    return "lock" in f"{code.co_qualname} {linecache.getline(code.co_filename, frame.f_lineno)}".lower()


def interrupted(answer: Iterator[str], after: int) -> bool:
    """Whether the first piece of an answer took more than ``after`` lines of Python, when an interrupt came.

    Between a lock and the ``with`` that releases it, httpcore and logging have a line on which an interrupt leaves the
    lock taken for ever. It comes on the next line then.
    """
    left = after

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal left
        left -= event == "line"
        if left < 0 and not takes_or_leaves_a_lock(frame):
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


def test_a_chat_with_a_server_loads_no_engine() -> None:
    code = "import sys, minisgl.chat; print(sorted({'torch', 'transformers', 'minisgl.llm'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
