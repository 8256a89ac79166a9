"""The program as a user meets it: in a terminal, and behind a pipe."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.kvcache.radix import RadixCache
from tests.server.harness import RunningServer, wait_until
from tests.tiny_text_model import Scripted, text_checkpoint

COMMAND = [sys.executable, "-m", "minisgl.chat"]


def cached_text(server: RunningServer) -> str:
    cache = server.core.scheduler.memory.cache
    assert isinstance(cache, RadixCache)
    return "".join(server.core.tokenizer.decode(node.tokens.tolist()) for node in cache.nodes())


def _hear_interrupts() -> None:
    """As in a terminal, also if these tests run in the background, where a shell has its programs ignore SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """The program in a terminal of its own.

    Args:
        options: of the program.
    """

    def __init__(self, *options: str) -> None:
        self._end, theirs = pty.openpty()
        environment = {**os.environ, "TERM": "dumb"}
        self.process = subprocess.Popen(
            [*COMMAND, *options],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment,
            start_new_session=True,
            preexec_fn=_hear_interrupts,
        )
        os.close(theirs)
        self._seen = ""

    def type(self, text: str) -> None:
        os.write(self._end, text.encode())

    def read_until(self, wanted: str, timeout: float = 60.0) -> str:
        """What has come since the last call, up to ``wanted``."""
        deadline = time.monotonic() + timeout
        while wanted not in self._seen:
            assert select.select([self._end], [], [], max(deadline - time.monotonic(), 0))[0], self._seen
            self._seen += os.read(self._end, 4096).decode(errors="replace")
        before, _, self._seen = self._seen.partition(wanted)
        return before

    def interrupt_until(self, wanted: str) -> None:
        """Interrupt it until it says ``wanted``: CPython loses a signal that comes just before readline waits.

        It has time to say so: while it still hears the first one, a second one means something else.
        """
        while True:
            os.kill(self.process.pid, signal.SIGINT)
            try:
                self.read_until(wanted, timeout=5)
                return
            except AssertionError:
                assert self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)
        os.close(self._end)


@pytest.fixture
def server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server whose model says the same to everything."""
    with RunningServer(checkpoint) as running:
        running.core.executor.launcher = Scripted([*running.core.tokenizer.encode("so be it")[1:], 1])
        yield running


@pytest.fixture
def terminal(server: RunningServer) -> Iterator[Terminal]:
    terminal = Terminal("--url", server.url)
    yield terminal
    terminal.close()


def test_a_chat_in_a_terminal(server: RunningServer, terminal: Terminal) -> None:
    terminal.read_until("/reset starts over")
    terminal.read_until("> ")

    terminal.type("the cat\n")
    terminal.read_until("so be it")
    terminal.read_until("> ")

    terminal.type("pasted line\nand its end\n")
    terminal.read_until("so be it")
    terminal.read_until("> ")
    assert "pasted line\nand its end" in cached_text(server), "one message"

    server.gate.allowed = 2
    terminal.type("the dog\n")
    wait_until(lambda: server.gate.allowed == 0)
    terminal.interrupt_until("(stopped)")
    wait_until(lambda: not server.core.scheduler.requests)
    server.gate.allowed = None
    terminal.read_until("> ")

    terminal.interrupt_until("(/exit or Ctrl-D ends)")
    terminal.read_until("> ")
    terminal.type("word " * 600 + "\n")
    terminal.read_until("error: ")
    terminal.read_until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(timeout=20) == 0


def test_a_chat_behind_a_pipe_with_an_engine_of_its_own(tmp_path: Path) -> None:
    checkpoint = text_checkpoint(tmp_path, max_position_embeddings=64)
    done = subprocess.run(
        [*COMMAND, "--model", str(checkpoint)],
        input=b"the cat \xff\n/reset\nthe dog\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.decode().split("(a new conversation)\n")
    assert first.strip()
    assert second.strip()


def test_without_anybody_to_talk_to_it_says_so() -> None:
    done = subprocess.run([*COMMAND, "--url", "http://127.0.0.1:9"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.strip().endswith("start one with python -m minisgl.serve")
