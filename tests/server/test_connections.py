"""Clients that send slowly, never read, or come in crowds: bounded in time, memory and number, and others go on."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import resource
import select
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h11
import httpx
import psutil
import pytest

from minisgl.server import connections, streaming
from minisgl.server.config import ServerConfig
from minisgl.server.connections import connection_class, on_loop_error
from tests.server.harness import ProcessServer, RunningServer, ServerThread, in_background, wait_until
from tests.server.test_life import send


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_logged", {})


def connect(server: RunningServer, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(server.address, timeout=20)
    connection.sendall(data)
    return connection


def rest(connection: socket.socket) -> bytes:
    """All that comes until the server closes the connection."""
    data = b""
    while piece := connection.recv(65536):
        data += piece
    return data


@pytest.fixture
def hasty(checkpoint: Path) -> Iterator[RunningServer]:
    """A server that gives its clients little time to say what they want."""
    with RunningServer(checkpoint, ServerConfig(header_timeout=0.3, body_timeout=0.2)) as running:
        yield running


HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"


@pytest.mark.parametrize("begun", [b"", HEAD, b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + HEAD])
def test_headers_that_do_not_come_end_the_connection(hasty: RunningServer, begun: bytes) -> None:
    with connect(hasty, begun) as connection:
        assert rest(connection).count(b"HTTP/1.1 200") == begun.count(b"/health")
    wait_until(lambda: not hasty.server.server_state.connections)


def test_headers_that_trickle_end_it_too(hasty: RunningServer) -> None:
    with connect(hasty, HEAD) as connection:
        end = time.monotonic() + 20
        while not select.select([connection], [], [], 0.02)[0]:  # until there is something to read: the end
            assert time.monotonic() < end
            connection.sendall(b"x: y\r\n")


def test_a_body_that_does_not_come_is_a_408(hasty: RunningServer) -> None:
    with connect(hasty, HEAD + b"content-length: 100\r\n\r\n{") as connection:
        answer = rest(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b"the body has not come within 0.2 s; send it faster, or raise --body-timeout" in answer


def test_a_request_at_work_is_not_taken_for_late(hasty: RunningServer) -> None:
    hasty.gate.allowed = 0
    asked = in_background(lambda: hasty.chat().choices[0].finish_reason)
    time.sleep(0.8)
    hasty.gate.allowed = None
    assert asked() == "length"


def test_one_connection_too_many_is_told_so(checkpoint: Path) -> None:
    with RunningServer(checkpoint, ServerConfig(max_connections=3)) as server:
        held = [connect(server) for _ in range(3)]
        wait_until(lambda: len(server.server.server_state.connections) == 3)
        with connect(server) as connection:
            answer = rest(connection)
        assert answer.startswith(b"HTTP/1.1 503")
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for each in held:
            each.close()
        wait_until(lambda: not server.server.server_state.connections)
        assert server.http.get("/health").status_code == 200


def test_a_cap_leaves_room_for_other_files(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (1024, 2000))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, both: limits.append(both))
    assert connection_class(ServerConfig(max_connections=500)).most == 500
    assert connection_class(ServerConfig(max_connections=4096)).most == 2000 - 256
    assert limits == [(1780, 2000), (2000, 2000)]
    assert "1744 connections at most" in caplog.text


def test_want_of_files_is_logged_once_in_a_while(caplog: pytest.LogCaptureFixture) -> None:
    loop = asyncio.new_event_loop()
    for _ in range(1000):
        error = OSError(24, "Too many open files")
        on_loop_error(loop, {"message": "socket.accept() out of system resource", "exception": error})
    on_loop_error(loop, {"message": "something else"})
    loop.close()
    assert [record.levelname for record in caplog.records] == ["ERROR", "ERROR"]
    assert "Too many open files" in caplog.text


def test_a_server_without_files_goes_on_when_it_has_them_again(checkpoint: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "minisgl.serve", "--model", str(checkpoint), "--in-process", "--port", "0"]
    options = ["--device", "cpu", "--num-pages", "64", "--page-size", "4", "--live-page", "false"]
    limit = "import resource, os, sys; resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200)); os.execv(*sys.argv[1:2],"
    few_files, log = [sys.executable, "-c", limit + " sys.argv[1:])"], tmp_path / "log"
    with log.open("wb") as file, subprocess.Popen([*few_files, *command, *options], stderr=file) as child:
        try:
            wait_until(lambda: b"serving" in log.read_bytes(), timeout=120.0)
            (port,) = re.findall(rb"http://127.0.0.1:([0-9]+)", log.read_bytes())
            crowd = [socket.create_connection(("127.0.0.1", int(port))) for _ in range(400)]
            time.sleep(3.0)
            for each in crowd:
                each.close()
            url = f"http://127.0.0.1:{int(port)}/health"
            wait_until(lambda: answers(url), timeout=60.0)
            assert len(log.read_bytes()) < 20_000
        finally:
            child.terminate()
            child.wait(60)


def answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.fixture
def endless(checkpoint: Path) -> Iterator[RunningServer]:
    """A server whose answers can be long."""
    config = ServerConfig(stall_timeout=0.5)
    with RunningServer(checkpoint, config, num_pages=4096, max_running_requests=64) as running:
        yield running


def deaf(server: ServerThread, n: int = 8, max_tokens: int = 400) -> socket.socket:
    """A client that asks for ``n`` long answers in a stream, with much in each chunk, and reads none of it."""
    connection = send(server, stream=True, n=n, max_tokens=max_tokens, logprobs=True, top_logprobs=20)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    return connection


def test_a_client_that_reads_nothing_is_left(endless: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), deaf(endless):
        wait_until(lambda: "its client has read nothing for 0.5 s; see --stall-timeout" in caplog.text, timeout=60.0)
        wait_until(lambda: not endless.engine.busy)
        wait_until(endless.idle)
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def streamed(server: ServerThread) -> tuple[int, int]:
    """The chunks with text of a stream of 40 tokens, read as fast as it comes, and the tokens that its usage tells."""
    body = {"model": server.model, "prompt": [1, 2, 3], "max_tokens": 40, "ignore_eos": True, "stream": True}
    encoded = json.dumps({**body, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}).encode()
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(encoded) + encoded)
    answer = await reader.read()
    writer.close()
    assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    counts = [int(count) for count in re.findall(rb'"completion_tokens":([0-9]+)', answer)]
    assert counts == sorted(counts)
    return answer.count(b'"finish_reason":"length"'), counts[-1]


async def all_streamed(server: ServerThread, clients: int) -> list[tuple[int, int]]:
    return await asyncio.gather(*(streamed(server) for _ in range(clients)))


@pytest.mark.slow
def test_fifty_clients_that_read_nothing_cost_two_hundred_others_no_token(checkpoint: Path, tmp_path: Path) -> None:
    path = shutil.copytree(checkpoint, tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    options = {"num_pages": 65536, "max_running_requests": 300}
    with ProcessServer(path, ServerConfig(stall_timeout=5.0), **options) as server:
        asyncio.run(all_streamed(server, 200))  # what a crowd needs once
        before = resident()
        silent = [deaf(server, n=2, max_tokens=8000) for _ in range(50)]  # no answer comes to its end by itself
        wait_until(lambda: server.states()["scheduler"] == 150, timeout=60.0)  # 50 jobs of two choices
        assert asyncio.run(all_streamed(server, 200)) == [(1, 40)] * 200
        held = [resident()]
        while not server.idle():
            held.append(resident())
            time.sleep(0.05)
        for each in silent:
            each.close()
    # At most 4,096 tokens and log-probabilities of each wait here, at about 130 bytes. Without that limit it is 69 MB.
    assert max(held) - before < 50 * 4096 * 200


def resident() -> int:
    """Bytes of memory that this process holds, which is the server's front when its engine is in others."""
    return psutil.Process().memory_info().rss


def test_a_long_answer_is_written_beside_the_event_loop(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "LONG", 8)
    threads: list[str] = []
    whole = streaming._whole

    def watched(*arguments: Any) -> bytes:
        threads.append(threading.current_thread().name)
        return whole(*arguments)

    monkeypatch.setattr(streaming, "_whole", watched)
    for max_tokens in (4, 12):
        answer = server.complete(max_tokens=max_tokens, logprobs=2, extra_body={"ignore_eos": True})
        assert answer.usage.completion_tokens == max_tokens
    assert [name.startswith("asyncio_") for name in threads] == [False, True]


@pytest.mark.parametrize("headers", [[], [("content-length", "5")], [("transfer-encoding", "chunked")]])
@pytest.mark.parametrize("start", [b"GET / HTTP/1.1", b"GET / HTTP/1.0", b"HEAD / HTTP/1.1"])
def test_each_response_is_written_as_h11_writes_it(start: bytes, headers: list[tuple[str, str]]) -> None:
    ours, its = connections._Http(h11.SERVER), h11.Connection(h11.SERVER)
    body = b"" if start.startswith(b"HEAD") else b"hello"
    data = [h11.Data(data=body[:2]), h11.Data(data=b""), h11.Data(data=body[2:])]
    for fields in (headers, [("content-length", "5")], headers):
        for each in (ours, its):
            each.receive_data(start + b"\r\nhost: x\r\n\r\n")
            assert [type(each.next_event()) for _ in range(2)] == [h11.Request, h11.EndOfMessage]
        events = [h11.Response(status_code=200, headers=fields), *data, h11.EndOfMessage()]
        assert [ours.send(event) for event in events] == [its.send(event) for event in events]
        assert ours.states == its.states
        if its.our_state is h11.MUST_CLOSE:
            break
        for each in (ours, its):
            each.start_next_cycle()
    for each in (ours, its):
        with pytest.raises(h11.LocalProtocolError):
            each.send(h11.Data(data=b"after the end"))
