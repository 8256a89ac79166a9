"""``python -m minisgl.serve`` under attack: whatever is killed, nobody waits in vain and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest

from tests.server.harness import MESSAGES, in_background, wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

STREAMS = 4
LONG = 250.0
"""Seconds in which a server must have started, however busy the machine is."""


class Served:
    """A server in a process group of its own, with its temporary files in ``directory``."""

    def __init__(self, checkpoint: Path, directory: Path, *flags: str) -> None:
        self.directory = directory
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}
        options = ["--model", str(checkpoint), "--port", "0", "--device", "cpu", "--num-pages", "64", *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.serve", *options],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0,
        )
        assert self.process.stderr is not None
        said = iter(self.process.stderr.readline, "")
        address = next(line for line in said if line.startswith("serving")).split()[-1]
        self._rest = in_background(lambda: list(said))
        self.client = openai.OpenAI(base_url=address, api_key="none", max_retries=0, timeout=100)
        self.health = address.removesuffix("/v1") + "/health"
        self.model = str(checkpoint)

    def child(self, kind: str) -> psutil.Process:
        """The one process whose main module is named like ``kind``."""
        (child,) = (each for each in self.children() if f".{kind}_worker" in " ".join(each.cmdline()))
        return child

    def children(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children()

    def connections(self) -> int:
        """How many clients are connected."""
        found = psutil.Process(self.process.pid).net_connections("tcp")
        return sum(each.status == psutil.CONN_ESTABLISHED for each in found)

    def stream(self) -> list[Any]:
        ask: dict[str, Any] = {"model": self.model, "messages": MESSAGES, "max_tokens": 60}
        return list(self.client.chat.completions.create(**ask, stream=True, extra_body={"ignore_eos": True}))

    def healthy(self) -> bool:
        return httpx.get(self.health).status_code == 200

    def log(self) -> str:
        """What it has said since it began to serve, once it has ended."""
        lines: Any = self._rest()
        return "".join(lines)


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path, as sockets need it. Must be empty at the end."""
    with tempfile.TemporaryDirectory(prefix="chaos-") as path:
        yield Path(path)
        assert not list(Path(path).glob("minisgl-*"))


@contextmanager
def served(checkpoint: Path, directory: Path, *flags: str) -> Iterator[Served]:
    server = Served(checkpoint, directory, *flags)
    children = server.children()
    try:
        yield server
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "orphans"
    finally:
        server.client.close()
        for process in (server.process, *children):
            if process.poll() is None if isinstance(process, subprocess.Popen) else process.is_running():
                process.kill()
        server.process.wait()


def attack(server: Served, kind: str) -> list[Any]:
    """Kill a process while the scheduler stands still in the middle of some requests; returns what became of these."""
    scheduler, victim = server.child("scheduler"), server.child(kind)
    scheduler.suspend()
    results = [in_background(server.stream) for _ in range(STREAMS)]
    wait_until(lambda: server.connections() >= STREAMS)
    assert server.healthy()
    victim.send_signal(signal.SIGKILL)
    if kind == "tokenizer":
        scheduler.resume()
    return [result() for result in results]


def test_with_restart_the_server_outlives_every_process_of_the_engine(checkpoint: Path, directory: Path) -> None:
    with served(checkpoint, directory, "--restart") as server:
        for kind in ("tokenizer", "detokenizer", "scheduler"):
            before = set(server.children())
            results = attack(server, kind)
            failed = [result for result in results if isinstance(result, openai.APIError)]
            assert all(f"the {kind}" in str(error) and "killed by SIGKILL" in str(error) for error in failed)
            assert failed or kind == "tokenizer", "what is past the tokenizer goes on without it"
            for chunks in results:
                assert chunks in failed or chunks[-1].choices[0].finish_reason == "length"
            wait_until(lambda: len(server.children()) == 3 and server.healthy(), timeout=LONG)
            survivors = before & set(server.children())
            assert len(survivors) == (2 if kind == "tokenizer" else 0), "no more is restarted than has to be"
            assert server.stream()[-1].choices[0].finish_reason == "length"
        children = server.children()
        server.process.kill()
        _, alive = psutil.wait_procs(children, timeout=30)
        assert not alive, "orphans"
        wait_until(lambda: not list(directory.glob("minisgl-*")))


def test_without_restart_the_server_ends_with_an_error(checkpoint: Path, directory: Path) -> None:
    with served(checkpoint, directory) as server:
        results = attack(server, "scheduler")
        assert all(isinstance(result, openai.APIError) for result in results)
        assert server.process.wait(timeout=30) == 1
        assert "the scheduler process was killed by SIGKILL" in server.log()


def test_ctrl_c_drains(checkpoint: Path, directory: Path) -> None:
    """As a terminal sends it: to the whole process group."""
    with served(checkpoint, directory) as server:
        scheduler = server.child("scheduler")
        scheduler.suspend()
        running = in_background(server.stream)
        wait_until(lambda: server.connections() >= 1)
        assert server.healthy()
        os.killpg(server.process.pid, signal.SIGINT)
        wait_until(lambda: not server.healthy())
        scheduler.resume()
        chunks: Any = running()
        refused = isinstance(chunks, openai.APIError) and "takes no more requests" in str(chunks)
        assert refused or chunks[-1].choices[0].finish_reason == "length"
        assert server.process.wait(timeout=30) == 0


def test_an_engine_that_cannot_start_says_why(checkpoint: Path, directory: Path) -> None:
    command = [sys.executable, "-m", "minisgl.serve", "--model", str(checkpoint), "--port", "0"]
    environment = {**os.environ, "TMPDIR": str(directory)}
    result = subprocess.run(
        [*command, "--decode-attention", "no-such-thing"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=LONG,
    )
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1].startswith("python -m minisgl.serve: error: ")
    assert "no-such-thing" in result.stderr.splitlines()[-1]
