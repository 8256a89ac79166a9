"""The commands that load servers, from end to end. Nothing that was timed is asserted."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minisgl.bench.__main__ import main
from minisgl.bench.processes import overhead_targets
from minisgl.bench.server import RunningServer, ServerFailed, served_model, server
from tests.bench.test_load import EXAMPLES


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[RunningServer]:
    """A server with tiny random weights, for all tests that do no harm to it."""
    root = tmp_path_factory.mktemp("server")
    model = served_model("tiny", root)
    with server(model, {}, root, timeout=200) as started:
        yield started


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    main([*arguments, "--output", str(path)])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def load(tmp_path: Path, running: RunningServer, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run ``serve`` against the server: rows of all tables as dicts, by load."""
    url = f"http://{running.address.host}:{running.address.port}"
    record = bench(tmp_path, "serve", "--url", url, "--vocab-size", "512", *arguments)
    rows: dict[str, dict[str, Any]] = {}
    for table in record["tables"]:
        for row in table["rows"]:
            rows.setdefault(row[0], {}).update(zip(table["columns"], row, strict=True))
    assert next(target for target in record["targets"] if "requests answered" in target["name"])["met"]
    return rows


def test_an_open_loop_has_a_row_for_each_rate(tmp_path: Path, running: RunningServer) -> None:
    arguments = ["--requests", "12", "--input-len", "4", "12", "--output-len", "20", "40"]
    rows = load(tmp_path, running, "--rate", "40", "80", *arguments)
    assert list(rows) == ["40/s", "80/s"]
    for row in rows.values():
        assert row["sent"] == row["finished"] == 12
        assert 0 < row["TTFT p50"] <= row["TTFT p99"] <= row["E2E p99"]
        assert row["TPOT p50"] > 0
        assert row["output tokens/s"] > row["requests/s"] > 0


def test_faulty_clients_and_bodies_are_told_apart(tmp_path: Path, running: RunningServer) -> None:
    arguments = ["--requests", "40", "--output-len", "12", "--input-len", "4", "8"]
    rows = load(tmp_path, running, "--concurrency", "8", "--disconnects", "0.25", "--malformed", "0.5", *arguments)
    row = rows["8 users"]
    assert (row["sent"], row["of them malformed"], row["error body"]) == (40, 20, 20)
    assert 1 <= row["client left"] <= 10
    assert row["finished"] == 20 - row["client left"]


@pytest.mark.parametrize("name", ["mooncake", "qwen"])
def test_a_trace_is_played_with_its_own_lengths(tmp_path: Path, running: RunningServer, name: str) -> None:
    trace = str(EXAMPLES / f"{name}-example.jsonl")
    rows = load(tmp_path, running, "--arrivals", "trace", trace, "--requests", "6", "--rate", "30")
    assert rows["30/s"]["finished"] == 6
    lines = [json.loads(line) for line in Path(trace).read_text().splitlines()[:6]]
    tokens = sum(line["output_length"] for line in lines)
    assert rows["30/s"]["output tokens/s"] / rows["30/s"]["requests/s"] == pytest.approx(tokens / 6)


def test_a_server_is_started_watched_and_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--requests", "6", "--output-len", "4", "--set", "num_pages=99", "max_seq_len=500"]
    record = bench(tmp_path, "serve", "--concurrency", "3", *arguments)
    assert record["settings"]["concurrency"] == [3]
    assert record["settings"]["options"] == {"num_pages": 99, "max_seq_len": 500}
    processes = record["tables"][-1]
    assert processes["rows"][0][0] == "serve"
    assert processes["rows"][-1][0] == "all"
    assert min(processes["rows"][-1][1:4]) > 10
    assert "in use at the end" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rate", "0"], "rate: must be positive"),
        (["--requests", "0"], "requests: must be positive"),
        (["--rate", "1", "--concurrency", "1"], "not allowed with"),
        (["--arrivals", "trace"], "arrivals: must be poisson, constant, or trace FILE"),
        (["--arrivals", "weekly"], "got weekly"),
        (["--arrivals", "trace", "missing.jsonl"], "missing.jsonl: cannot be read"),
        (["--disconnects", "0.6", "--malformed", "0.5"], "add up to 1"),
        (["--input-len", "9", "3"], "input_len: must be"),
        (["--url", "http://127.0.0.1:1"], "does not name a model"),
        (["--set", "page_size=3"], "page_size: must be a power of two"),
    ],
)
def test_what_cannot_be_run_is_explained(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        bench(tmp_path, "serve", *arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


eight_servers = pytest.mark.timeout(900)
"""`kills` starts them one after the other."""


@pytest.fixture(scope="module")
def kills(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> dict[str, dict[str, Any]]:
    """What followed each kill, by what was killed."""
    record = bench(tmp_path_factory.mktemp("faults"), "faults", "--users", "5", "--output-len", "600")
    found: dict[str, dict[str, Any]] = {}
    for table in record["tables"]:
        for row in table["rows"]:
            found.setdefault(row[0], {}).update(zip(table["columns"], row, strict=True))
    return found


@eight_servers
def test_each_process_is_killed_and_each_request_has_an_outcome(kills: dict[str, dict[str, Any]]) -> None:
    engine = ("scheduler", "detokenizer", "tokenizer")
    stopped = [f"{kind}, stopped" for kind in engine]
    assert set(kills) == {f"{kind}{how}" for kind in (*engine, "serve", *stopped) for how in ("", ", --restart")}
    for kind in engine:
        assert kills[kind].get("error body", 0) + kills[kind].get("error event", 0) == 5
        assert kills[kind]["server"] == "exit code 1"
        assert kills[f"{kind}, --restart"]["server"] == "serves again"
    assert all(row["in flight"] == 5 and row["left behind"] == "nothing" for row in kills.values())
    assert all("timeout" not in row for row in kills.values())


@eight_servers
def test_nobody_is_left_to_restart_the_supervisor(kills: dict[str, dict[str, Any]]) -> None:
    for name in ("serve", "serve, --restart"):
        assert kills[name]["server"] == "killed by SIGKILL"
        assert kills[name]["connection closed"] == 5


@eight_servers
def test_a_new_tokenizer_costs_no_request_that_is_past_the_old_one(kills: dict[str, dict[str, Any]]) -> None:
    assert kills["tokenizer, --restart"]["finished"] == 5


def test_the_servers_time_is_told_from_the_engines(tmp_path: Path) -> None:
    record = bench(tmp_path, "api", "--streams", "3", "--output-len", "40", "--repeat", "1")
    batch, processes = record["tables"]
    ((streams, alone, served, outside),) = batch["rows"]
    assert streams == 3
    assert alone > 0
    assert served > 0
    assert outside == pytest.approx(served - alone)
    assert {"engine alone", "scheduler", "detokenizer", "serve, event loop"} <= {row[1] for row in processes["rows"]}


def test_a_server_that_is_not_there_in_time_is_ended(tmp_path: Path) -> None:
    model = served_model("tiny", tmp_path)
    late = server(model, {}, tmp_path, timeout=0.0)
    with pytest.raises(ServerFailed, match="did not answer within 0 s; raise --start-timeout"), late:
        pass


def test_a_client_that_is_told_to_end_takes_its_server_along(tmp_path: Path) -> None:
    model = served_model("tiny", tmp_path)
    handler = signal.getsignal(signal.SIGTERM)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()
    with pytest.raises(SystemExit) as caught, server(model, {}, tmp_path, timeout=100):
        pass
    assert caught.value.code == 128 + signal.SIGTERM
    assert signal.getsignal(signal.SIGTERM) is handler
    assert not [child for child in psutil.Process().children() if model.path in child.cmdline()]


def test_a_millisecond_at_256_streams_and_growth_no_faster_than_theirs() -> None:
    targets = list(overhead_targets({256: 2.0, 1024: 7.0}, {256: 0.5, 512: 1.5}))
    assert [(target.value, target.limit, target.met) for target in targets] == [
        (2.0, 1.0, False),
        (3.5, 4.0, True),
        (0.5, 1.0, True),
        (3.0, 2.0, False),
    ]
    assert list(overhead_targets({512: 2.0}, {512: 1.0})) == []
