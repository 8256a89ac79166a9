"""A server of our own to be measured: started, waited for, and ended."""

from __future__ import annotations

import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from minisgl.bench.serve.client import Target
from minisgl.bench.serve.errors import ServerFailed

HOST = "127.0.0.1"
_STOP_TIMEOUT = 60.0
_LAST_LINES = 20
_POLL = 0.1


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server that answers.

    Args:
        process: its first.
        target: where it is.
        directory: where it puts temporary files, and nobody else does.
        log: file that it writes its messages to.
    """

    process: subprocess.Popen[bytes]
    target: Target
    directory: Path
    log: Path

    def stop(self) -> int:
        """End it as an operator does, with SIGTERM, and return its exit code.

        Raises:
            ServerFailed: it has not ended after a minute, and was killed.
        """
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired as error:
            self.process.kill()
            self.process.wait()
            raise ServerFailed(f"the server did not end within {_STOP_TIMEOUT:g} s of SIGTERM") from error


@contextmanager
def server(
    model: str, vocab_size: int, options: Mapping[str, Any], root: Path, timeout: float
) -> Iterator[RunningServer]:
    """``python -m minisgl.serve`` on a free port, while the block runs. It is ended afterwards, by force if need be.

    Call it in the main thread, which ends the server when it gets a SIGTERM itself.

    Args:
        model: as ``--model`` takes it.
        vocab_size: ids of prompts will lie below this.
        options: flags of the command, by names with underscores.
        root: a directory for its log and its temporary files.
        timeout: seconds until it must answer.

    Raises:
        ServerFailed: it ended, or did not answer in time; the message has the end of its log.
    """
    allow_many_sockets()
    directory = root / "tmp"
    directory.mkdir(exist_ok=True)
    log = root / "server.log"
    port = _free_port()
    given = {"model": model, "host": HOST, "port": port, **options}
    flags = [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", _as_word(value))]
    compiled = {"TORCHINDUCTOR_CACHE_DIR": f"{tempfile.gettempdir()}/torchinductor"}  # else below its TMPDIR
    before = signal.signal(signal.SIGTERM, _leave)
    environment = {**compiled, **os.environ, "TMPDIR": str(directory)}
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.serve", *flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            process_group=0,  # Ctrl-C is for the client, which then ends the server
        )
    try:
        _wait_until_healthy(process, port, log, timeout)
        yield RunningServer(process, Target(HOST, port, model_of(HOST, port), vocab_size), directory, log)
    finally:
        _end(process)
        signal.signal(signal.SIGTERM, before)


def model_of(host: str, port: int) -> str:
    """The name of the model that a server has.

    Raises:
        ServerFailed: it cannot be reached, or does not say.
    """
    try:
        name: str = json.loads(get(host, port, "/v1/models")[1])["data"][0]["id"]
    except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
        message = (
            f"http://{host}:{port}/v1/models does not name a model ({error!r}); is an OpenAI-compatible server there?"
        )
        raise ServerFailed(message) from error
    return name


def get(host: str, port: int, path: str, timeout: float = 5.0) -> tuple[int, bytes]:
    """Status and body of a small page. Raises `OSError` or `http.client.HTTPException`."""
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def allow_many_sockets() -> None:
    """Raise this process's limit of open files as far as it may; the server inherits it."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _wait_until_healthy(process: subprocess.Popen[bytes], port: int, log: Path, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise ServerFailed(f"the server ended with exit code {process.returncode}:\n{_last_lines(log)}")
        try:
            if get(HOST, port, "/health")[0] == 200:
                return
        except (OSError, http.client.HTTPException):
            pass  # it does not listen yet
        time.sleep(_POLL)
    raise ServerFailed(f"the server did not answer within {timeout:g} s; raise --start-timeout:\n{_last_lines(log)}")


def _leave(number: int, frame: FrameType | None) -> None:
    """A client that is told to end takes its server along."""
    raise SystemExit(128 + number)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _last_lines(log: Path) -> str:
    return "\n".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LAST_LINES:])


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _as_word(value: object) -> str:
    """A value as a flag takes it: JSON's booleans in lower case, lists with commas."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
