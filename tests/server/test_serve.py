"""``python -m minisgl.serve`` as a process of its own, and its flags."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import logging
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from unittest.mock import Mock, patch

import openai
import pytest
import uvicorn

from minisgl.config import EngineConfig
from minisgl.core import EngineCore
from minisgl.errors import ConfigError
from minisgl.serve import main
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig, add_options, given_options
from minisgl.server.launch import Server, bind
from minisgl.server.scheduler_worker import record_trace
from minisgl.trace import Trace
from tests.server.harness import MESSAGES, TINY, in_background, wait_until


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back the handlers of signals and of logs that a server in this process installs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    logs = logging.getLogger().handlers[:]
    yield
    logging.getLogger().handlers[:] = logs
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def flags(checkpoint: Path, port: int = 0) -> list[str]:
    options = {"model": checkpoint, "port": port, "num-pages": 64, "max-running-requests": 8, "device": "cpu"}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def client_of(log: Path, api_key: str = "none", process: subprocess.Popen[str] | None = None) -> openai.OpenAI:
    """A client of a server, once it serves.

    Args:
        log: file to which its standard error goes, where it says on which port it serves.
        api_key: to show it.
        process: its own, if it has one, which must not end before.
    """

    def serving() -> list[str]:
        assert process is None or process.poll() is None, log.read_text()
        return re.findall(r"^serving .* on (\S+)\n", log.read_text(), re.MULTILINE)

    wait_until(lambda: bool(serving()), timeout=200)
    client = openai.OpenAI(base_url=serving()[0], api_key=api_key, max_retries=0)
    assert client.models.list().data
    return client


@contextlib.contextmanager
def standard_error_in(log: Path) -> Iterator[None]:
    """Write to a file what this process says, so that another thread can read it meanwhile."""
    with log.open("w") as stream, contextlib.redirect_stderr(stream):
        yield


def test_processes_keep_the_key_to_themselves_log_and_write_their_trace(checkpoint: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINISGL_API_KEY": "a-secret-key"}
    options = [*flags(checkpoint), "--trace", str(tmp_path / "trace.json"), "--log-format", "json"]
    command = [sys.executable, "-m", "minisgl.serve", *options]
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stderr=stream, text=True)
    try:
        with client_of(log, "a-secret-key", process) as client:
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="another").models.list()
            answer = client.chat.completions.create(
                model=str(checkpoint), messages=MESSAGES, max_tokens=5, extra_headers={"x-request-id": "the-request"}
            )
            assert answer.usage is not None
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=60) == 0
        said = log.read_text()
        assert "a-secret-key" not in said
        lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert {"POST /v1/chat/completions", "GET /v1/models"} <= {line.get("endpoint") for line in lines}
        told = {line["process"] for line in lines if line.get("request_id") == "the-request"}
        assert told == {"api", "tokenizer-0", "scheduler", "detokenizer"}
        assert any(event.name == "launch" for event in Trace.load(tmp_path / "trace.json").events)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("handlers")
def test_both_signals_end_the_server_cleanly(checkpoint: Path, tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log"

    def stop() -> int:
        client_of(log).close()
        frozen = gc.get_freeze_count()
        os.kill(os.getpid(), number)
        return frozen

    with standard_error_in(log):
        result = in_background(stop)
        assert main([*flags(checkpoint), "--in-process"]) == 0
    assert result() > 10_000
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("handlers")
def test_a_dead_engine_ends_the_server_with_an_error(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(core: EngineCore) -> None:
        raise RuntimeError("struck by lightning")

    monkeypatch.setattr(EngineCore, "step", step)
    log = tmp_path / "log"

    def ask() -> None:
        with client_of(log) as client:
            client.chat.completions.create(model=str(checkpoint), messages=MESSAGES)

    with standard_error_in(log):
        result = in_background(ask)
        assert main([*flags(checkpoint), "--in-process"]) == 1
    assert "struck by lightning" in str(result())


def test_the_api_process_has_nothing_of_the_engine() -> None:
    """No model is in it, and not even the code that would run one: that is what the other processes are for."""
    code = "import minisgl.serve, sys; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    engine = ("minisgl.llm", "minisgl.engine", "minisgl.scheduler", "minisgl.attention", "minisgl.kernels")
    assert not set(engine) & set(result.stdout.split())


@pytest.mark.usefixtures("handlers")
def test_a_port_that_is_taken(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(flags(checkpoint, port)) == 1
    assert f"port: {port} is taken on 127.0.0.1" in capsys.readouterr().err


def test_a_port_belongs_to_the_server_that_still_loads_and_to_the_next_one_at_once() -> None:
    first = bind("127.0.0.1", 0)
    port = first.getsockname()[1]
    with first, pytest.raises(ConfigError, match=f"port: {port} is taken"):
        bind("127.0.0.1", port)
    engine = Mock(AsyncEngine, model="m")
    for _ in range(2):  # the first leaves connections behind, which the kernel remembers for a minute
        listener = bind("127.0.0.1", port)
        server = Server.__new__(Server)
        server.engine = engine
        with patch.object(uvicorn.Server, "startup"):
            asyncio.run(server.startup([listener]))
        listener.listen()
        with socket.create_connection(("127.0.0.1", port)):
            listener.accept()[0].close()
        listener.close()


@pytest.mark.usefixtures("handlers")
@pytest.mark.parametrize("in_process", [True, False])
def test_a_trace_that_cannot_be_written_is_an_error_before_anything_is_served(
    checkpoint: Path, capsys: pytest.CaptureFixture[str], in_process: bool
) -> None:
    words = [*flags(checkpoint), "--trace", "/dev/full", "--in-process", str(in_process)]
    assert main(words) == 1
    err = capsys.readouterr().err
    assert "trace: cannot write /dev/full (No space left on device)" in err
    assert "serving" not in err


def test_a_trace_that_cannot_be_written_at_the_end_is_an_error(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"

    def serve_and_lose_the_file() -> None:
        with EngineCore(EngineConfig(model=str(checkpoint), **TINY)) as core, record_trace(core, str(path)):
            path.unlink()
            path.mkdir()

    with pytest.raises(ConfigError, match="trace: cannot write"):
        serve_and_lose_the_file()


@pytest.mark.parametrize(("host", "port", "name"), [("127.0.0.1", 70000, "port"), ("no such host", 0, "host")])
def test_an_address_that_cannot_be(host: str, port: int, name: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: "):
        bind(host, port)


def test_bad_options_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    for words, name in ((["--page-size", "3"], "page_size"), (["--batch-size", "3"], "--batch-size")):
        with pytest.raises(SystemExit) as caught:
            main(words)
        assert caught.value.code == 2
        assert name in capsys.readouterr().err


def test_every_option_of_the_server_is_a_flag_with_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServerConfig)
    assert all(action.help for action in parser._actions)
    words = ["--tokenizer-workers", "3", "--restart", "--drain-timeout", "2.5", "--start-timeout", "9"]
    given = ServerConfig(**given_options(parser.parse_args(words), ServerConfig))
    assert given == ServerConfig(tokenizer_workers=3, restart=True, drain_timeout=2.5, start_timeout=9.0)
    for wrong in ({"tokenizer_workers": 0}, {"start_timeout": 0.0}, {"drain_timeout": -1.0}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            ServerConfig(**wrong)


def test_every_option_is_a_flag_with_a_help_text() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, ServerConfig)
    add_options(parser, EngineConfig)
    actions = {action.dest: action for action in parser._actions if action.dest != "help"}
    assert set(actions) == {field.name for kind in (ServerConfig, EngineConfig) for field in fields(kind)}
    assert all(action.help for action in actions.values())
    assert actions["page_size"].help == "tokens in a KV page, a power of two from 1 to 256. Default: 16."
    words = ["--cors-origin", "https://a.org,https://b.org"]
    assert given_options(parser.parse_args(words), ServerConfig) == {"cors_origin": ("https://a.org", "https://b.org")}
    words = ["--fusions", "norm,rope", "--queue-policy", "lpm", "--decode-attention", "triton"]
    given = given_options(parser.parse_args(words), EngineConfig)
    assert given == {"fusions": ("norm", "rope"), "queue_policy": "lpm", "decode_attention": "triton"}
    assert given_options(parser.parse_args(["--fusions", ""]), EngineConfig) == {"fusions": ()}
    words = ["--max-seq-len", "9", "--memory-ratio", "0.5", "--prefix-cache", "none"]
    given = given_options(parser.parse_args(words), EngineConfig)
    assert given == {"max_seq_len": 9, "memory_ratio": 0.5, "prefix_cache": "none"}


def test_a_flag_may_have_a_short_form() -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig, {"tensor_parallel_size": "--tp"})
    for flag in ("--tp", "--tensor-parallel-size"):
        assert given_options(parser.parse_args([flag, "4"]), EngineConfig) == {"tensor_parallel_size": 4}


def test_flags_of_truth_values_and_lists(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_options(parser, EngineConfig)
    words = ["--overlap", "false", "--enforce-eager", "True", "--graph-batches", "1,2,8"]
    given = given_options(parser.parse_args(words), EngineConfig)
    assert given == {"overlap": False, "enforce_eager": True, "graph_batches": (1, 2, 8)}
    alone = given_options(parser.parse_args(["--overlap", "--page-size", "4"]), EngineConfig)
    assert alone == {"overlap": True, "page_size": 4}
    for words in (["--overlap", "maybe"], ["--graph-batches", "1,x"]):
        with pytest.raises(SystemExit):
            parser.parse_args(words)
        assert words[0] in capsys.readouterr().err
