"""``python -m minisgl.serve`` as a process of its own, and its flags."""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import openai
import pytest

from minisgl import LLM
from minisgl.core.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.serve import main
from minisgl.server.config import ServerConfig
from minisgl.server.launch import bind
from minisgl.server.options import add_options, given_options
from minisgl.trace import Trace
from tests.server.harness import MESSAGES, in_background, wait_until


@pytest.fixture
def handlers() -> Iterator[None]:
    """Puts back the signal handlers that a server in this process installs."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, before, strict=True):
        signal.signal(number, handler)


def flags(checkpoint: Path, port: int) -> list[str]:
    options = {"model": checkpoint, "port": port, "num-pages": 64, "max-running-requests": 8, "device": "cpu"}
    return [word for name, value in options.items() for word in (f"--{name}", str(value))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def client_of(port: int, api_key: str = "none") -> openai.OpenAI:
    """A client of the server on ``port``, once it listens."""
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=api_key, max_retries=0)

    def listens() -> bool:
        try:
            return bool(client.models.list().data)
        except openai.APIConnectionError:
            return False

    wait_until(listens, timeout=200)
    return client


def test_processes_keep_the_key_to_themselves_log_and_write_their_trace(checkpoint: Path, tmp_path: Path) -> None:
    port = free_port()
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MINISGL_API_KEY": "a-secret-key"}
    options = [*flags(checkpoint, port), "--trace", str(tmp_path / "trace.json"), "--log-format", "json"]
    command = [sys.executable, "-m", "minisgl.serve", *options]
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        with client_of(port, api_key="a-secret-key") as client:
            with pytest.raises(openai.AuthenticationError):
                client.with_options(api_key="another").models.list()
            answer = client.chat.completions.create(model=str(checkpoint), messages=MESSAGES, max_tokens=5)
            assert answer.usage is not None
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "a-secret-key" not in log
        lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
        assert {"POST /v1/chat/completions", "GET /v1/models"} <= {line.get("endpoint") for line in lines}
        assert any(event.name == "launch" for event in Trace.load(tmp_path / "trace.json").events)
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.usefixtures("handlers")
def test_both_signals_end_the_server_cleanly(checkpoint: Path, number: signal.Signals) -> None:
    port = free_port()

    def stop() -> None:
        client_of(port).close()
        os.kill(os.getpid(), number)

    result = in_background(stop)
    assert main([*flags(checkpoint, port), "--in-process"]) == 0
    assert result() is None


@pytest.mark.usefixtures("handlers")
def test_a_dead_engine_ends_the_server_with_an_error(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step(llm: LLM) -> None:
        raise RuntimeError("struck by lightning")

    monkeypatch.setattr(LLM, "step", step)
    port = free_port()

    def ask() -> None:
        with client_of(port) as client:
            client.chat.completions.create(model=str(checkpoint), messages=MESSAGES)

    result = in_background(ask)
    assert main([*flags(checkpoint, port), "--in-process"]) == 1
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
    assert actions["page_size"].help == "tokens a KV page, a power of two from 1 to 256. Default: 16."
    words = ["--cors-origin", "https://a.org,https://b.org"]
    assert given_options(parser.parse_args(words), ServerConfig) == {"cors_origin": ("https://a.org", "https://b.org")}
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
