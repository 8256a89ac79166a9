"""What is read off a server's processes and metrics."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from minisgl.bench.serve.gauges import Gauges, parse_gauges
from minisgl.bench.serve.loops import Heartbeat
from minisgl.bench.serve.processes import ProcessTree, kind_of
from minisgl.bench.serve.records import Outcome
from minisgl.bench.serve.summary import Limits, Summary
from minisgl.bench.serve.tables import Run, all_tables, all_targets
from minisgl.bench.serve.watch import Watch
from tests.bench.serve.records import planned, record

METRICS = """\
# HELP minisgl_requests_waiting Requests in the engine's queue.
# TYPE minisgl_requests_waiting gauge
minisgl_requests_waiting 3.0
# HELP minisgl_requests_running Requests in the engine's running batch.
# TYPE minisgl_requests_running gauge
minisgl_requests_running 2.0
# HELP minisgl_kv_page_pool_size KV pages in all.
# TYPE minisgl_kv_page_pool_size gauge
minisgl_kv_page_pool_size 64.0
# HELP minisgl_kv_pages KV pages by state.
# TYPE minisgl_kv_pages gauge
minisgl_kv_pages{state="used"} 5.0
minisgl_kv_pages{state="cached"} 7.0
minisgl_kv_pages{state="free"} 52.0
"""


def watch(growth: float, **fields: object) -> Watch:
    """A server of one process that has grown by so many bytes a second for a minute."""
    tree = ProcessTree.__new__(ProcessTree)
    tree.kinds = {psutil.Process(): "serve"}
    times = [0.5 * index for index in range(121)]
    resident = [{"serve": int(1_000_000 + growth * max(now, 30.0))} for now in times]
    defaults = {"before": {"serve": 7}, "after": {"serve": 7}, "times": times, "resident": resident}
    return Watch(tree, **{**defaults, **fields})


def verdicts(seen: Watch) -> dict[str, bool]:
    beat = Heartbeat([0.001], in_flight=1.0, seconds=1.0, cpu=0.1)
    run = Run(Summary("load", [record(0.0, 1.0)], Limits(1.0, 1.0)), beat, 1, seen)
    return {target.name.partition(": ")[2].partition(",")[0]: target.met for target in all_targets([run])}


def test_gauges_are_read_by_name_and_label() -> None:
    assert parse_gauges(METRICS) == Gauges(running=2, waiting=3, used_pages=5, pages=64)
    assert not Gauges(running=2, waiting=3, used_pages=5, pages=64).idle
    assert Gauges(running=0, waiting=0, used_pages=0, pages=64).idle
    assert parse_gauges("# TYPE up gauge\nup 1.0\n") is None


def test_growth_is_that_of_the_second_half() -> None:
    growing = watch(1000.0)
    assert growing.growth(growing.total) == pytest.approx(30_000, rel=0.01)
    assert growing.growth([5] * 121) == pytest.approx(0.0, abs=1e-6)
    assert Watch(growing.tree, times=[0.0, 0.5, 1.0], resident=[{}] * 3).growth([1, 2, 3]) is None


def test_leaks_miss_their_targets() -> None:
    idle = Gauges(running=0, waiting=0, used_pages=0, pages=64)
    assert all(verdicts(watch(0.0, gauges=idle)).values())
    assert not verdicts(watch(1000.0))["memory"]
    assert not verdicts(watch(0.0, after={"serve": 8}))["open files"]
    assert not verdicts(watch(0.0, gauges=Gauges(running=0, waiting=0, used_pages=1, pages=64)))["pages given back"]


def test_tables_have_a_cell_for_each_column_whatever_happened() -> None:
    beat = Heartbeat([0.001], in_flight=1.0, seconds=1.0, cpu=0.1)
    refused = record(0.0, ended=1.0, outcome=Outcome.REFUSED, status=503)
    wrong = record(0.0, ended=2.0, outcome=Outcome.REFUSED, status=400, planned=planned(malformed="cut off"))
    runs = [
        Run(Summary("1/s", [record(0.0, 1.0, 1.5)], Limits(1.0, 1.0)), beat, 2, watch(0.0)),
        Run(Summary("2/s", [refused, wrong], Limits(1.0, 1.0)), beat, 0, None),
    ]
    tables = all_tables(runs)
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    throughput, first_token, _, answers, _, server = tables
    assert throughput.rows[0][1:] == [1 / 1.5, 2 / 1.5, 1 / 1.5, "100%"]
    assert first_token.rows[0][1] == 1000.0
    assert first_token.rows[1][1] == "–"
    assert answers.columns[3:] == ["finished", "error body"]
    assert [list(row) for row in answers.rows] == [["1/s", 1, 0, 1, 0], ["2/s", 2, 1, 0, 2]]
    assert [row[0] for row in server.rows] == ["serve", "all"]


def test_a_process_that_has_ended_is_not_alive_though_nobody_has_collected_it() -> None:
    with subprocess.Popen(["true"]) as process:
        tree = ProcessTree.__new__(ProcessTree)
        tree.kinds = {psutil.Process(process.pid): "serve"}
        deadline = time.monotonic() + 20.0
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < deadline, "waited in vain"
            time.sleep(0.01)
        assert tree.alive() == []


def test_a_process_is_what_it_runs() -> None:
    waits = "import sys; print('up', flush=True); sys.stdin.read()"
    starts = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {waits!r}, '-m', 'minisgl.serve'])"
    command = [sys.executable, "-c", starts]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"up\n"
        tree = ProcessTree(parent.pid)
        assert kind_of(psutil.Process(parent.pid)) is None
        assert list(tree.kinds.values()) == ["serve"]
        assert tree.resident()["serve"] > 1_000_000
        assert tree.descriptors()["serve"] >= 3
        parent.communicate()
    assert tree.alive() == []
    assert tree.resident() == tree.descriptors() == tree.cpu_seconds() == {}
    assert kind_of(next(iter(tree.kinds))) is None
