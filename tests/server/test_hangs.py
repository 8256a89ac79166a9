"""Processes of the engine that are stopped: their requests end with an error that names them, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from minisgl.processes import ChildProcess
from minisgl.server.config import ServerConfig
from minisgl.server.launch import Server
from tests.distributed import broken
from tests.server.harness import ProcessServer, in_background, wait_until

pytestmark = pytest.mark.slow

HANG_TIMEOUT = 3.0
KINDS = ("tokenizer", "detokenizer", "scheduler")


@pytest.fixture(scope="module")
def restarting(checkpoint: Path) -> Iterator[ProcessServer]:
    with ProcessServer(checkpoint, ServerConfig(restart=True), hang_timeout=HANG_TIMEOUT) as server:
        yield server


def child_of(server: ProcessServer, kind: str) -> ChildProcess:
    return next(child for child in server.engine._topology.children if child.name.startswith(kind))


def stop(server: ProcessServer, kind: str) -> list[Any]:
    """Stop a process in the middle of an answer, ask for another one, and return what becomes of the two."""
    answer = server.complete(stream=True, max_tokens=180, extra_body={"ignore_eos": True})
    next(iter(answer))
    os.kill(child_of(server, kind).pid, signal.SIGSTOP)
    rest = in_background(lambda: list(answer))
    asked = in_background(server.chat)
    return [rest(), asked()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_stopped_process_is_named_killed_and_restarted(restarting: ProcessServer, kind: str) -> None:
    victim = child_of(restarting, kind)
    begun, asked = stop(restarting, kind)
    error = f"the {victim.name} process has not answered for {HANG_TIMEOUT:g} s; it is stopped or hangs"
    assert isinstance(asked, openai.APIError)
    assert error in str(asked)
    if kind == "tokenizer":
        assert begun[-1].choices[0].finish_reason == "length", "what is past the tokenizer goes on without it"
    else:
        assert isinstance(begun, openai.APIError)
        assert error in str(begun)
    assert not psutil.pid_exists(victim.pid)
    wait_until(lambda: restarting.http.get("/health").status_code == 200, timeout=60.0)
    assert restarting.chat().choices[0].finish_reason == "length"
    wait_until(restarting.idle)


@pytest.mark.parametrize("kind", KINDS)
def test_without_restart_health_says_so_and_the_server_ends(
    checkpoint: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProcessServer(checkpoint, ServerConfig(), hang_timeout=HANG_TIMEOUT) as server, monkeypatch.context() as patch:
        patch.setattr(Server, "on_tick", lambda server, counter: asyncio.sleep(0, False))
        victim = child_of(server, kind)
        assert all(isinstance(result, openai.APIError) for result in stop(server, kind)[1:])
        health = server.http.get("/health")
        assert health.status_code == 503
        assert f"the {victim.name} process has not answered for 3 s" in health.text
        patch.undo()
        wait_until(lambda: not server.server.servers[0].is_serving())
        assert server.server.exit_code == 1
        wait_until(lambda: all(child.exited.done() for child in server.engine._topology.children))
        assert not server.engine._topology.directory.exists()


def test_a_server_at_rest_or_at_work_is_not_taken_for_stopped(restarting: ProcessServer) -> None:
    before = [child.pid for child in restarting.engine._topology.children]
    streams = [in_background(lambda: list(restarting.complete(stream=True, max_tokens=180))) for _ in range(8)]
    for stream in streams:
        chunks: Any = stream()
        assert chunks[-1].choices[0].finish_reason
    restarting.call(asyncio.sleep(HANG_TIMEOUT + 1.0))
    assert restarting.chat().choices[0].finish_reason == "length"
    assert [child.pid for child in restarting.engine._topology.children] == before


@pytest.mark.parametrize("attention", ["SlowOnce", "HangsInAStep"])
def test_a_step_may_last_as_long_as_a_collective_and_no_longer(checkpoint: Path, attention: str) -> None:
    own: dict[str, Any] = dict.fromkeys(("prefill_attention", "decode_attention"), f"{broken.__name__}:{attention}")
    with ProcessServer(checkpoint, ServerConfig(), hang_timeout=2.0, distributed_timeout=6.0, **own) as server:
        if attention == "SlowOnce":
            assert server.chat().choices[0].finish_reason == "length"
            assert not child_of(server, "scheduler").exited.done()
        else:
            with pytest.raises(openai.APIError, match="the scheduler process has made no progress for 6 s; its main"):
                server.chat()
