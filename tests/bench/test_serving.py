"""Times and rates of records that were made by hand, and what is read off a server under load."""

from __future__ import annotations

import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from minisgl.bench.client import ClientMonitor, Outcome
from minisgl.bench.server import Gauges, ProcessTree, ServerMonitor, kind_of, parse_gauges
from minisgl.bench.serving import SLO, LoadRun, LoadSummary, load_report, percentiles
from tests.bench.scripted import planned, record

OBJECTIVE = SLO(ttft=1.0, tpot=0.1)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=137).tolist()
    ordered = sorted(values)
    found = percentiles(values, 50, 99, 0, 100)
    assert found is not None
    assert found[0] == ordered[68]
    assert found[1] == pytest.approx(ordered[134] + 0.64 * (ordered[135] - ordered[134]))  # rank 0.99 × 136 = 134.64
    assert found[2:] == [ordered[0], ordered[-1]]
    assert percentiles([], 50) is None


def test_times_count_from_when_a_request_was_due() -> None:
    one = record(10.0, 10.5, 10.7, 11.1, sent=10.2, ended=11.3)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.3)
    assert one.latency == pytest.approx(1.3)
    summary = LoadSummary("4/s", [one], OBJECTIVE)
    assert summary.itl == pytest.approx([0.2, 0.4])
    assert summary.largest_gaps == pytest.approx([0.4])


def test_tokens_that_come_together_are_all_counted() -> None:
    one = record(0.0, 1.0, 2.0, tokens=6)  # two pieces of three tokens
    assert one.tpot == pytest.approx(0.2)
    assert record(0.0, 1.0, tokens=1).tpot is None


def test_rates_are_over_all_the_time_and_of_what_finished() -> None:
    records = [
        record(0.0, 0.5, 1.0),
        record(1.0, 2.0, 4.0),
        record(2.0, ended=5.0, outcome=Outcome.REFUSED),
        record(2.0, 2.5, ended=2.6, outcome=Outcome.LEFT),
    ]
    summary = LoadSummary("", records, OBJECTIVE)
    assert summary.seconds == 5.0
    assert summary.throughput == pytest.approx(2 / 5)
    assert summary.output_throughput == pytest.approx(4 / 5)
    assert summary.outcomes[Outcome.FINISHED] == 2
    assert len(summary.ttft) == 2
    assert summary.little == pytest.approx((1.0 + 3.0 + 3.0 + 0.6) / 5)


def test_goodput_counts_what_finished_within_both_limits() -> None:
    good = [record(0.0, 1.0, 1.05), record(0.0, 0.9, tokens=1), record(0.0, 0.5, 0.65, 0.68)]
    late = record(0.0, 1.2, 1.25)
    slow = record(0.0, 0.5, 0.8)
    hasty = record(0.0, 0.1, 0.2, outcome=Outcome.WRONG_LENGTH)
    last = record(0.0, 0.2, 10.0)
    assert [OBJECTIVE.met_by(each) for each in (*good, late, slow, hasty, last)] == [True] * 3 + [False] * 4
    assert LoadSummary("", [*good, late, slow, hasty, last], OBJECTIVE).goodput == pytest.approx(3 / 10)


@pytest.mark.parametrize(
    ("fields", "answered"),
    [
        ({}, True),
        ({"outcome": Outcome.REFUSED, "status": 503}, True),
        ({"outcome": Outcome.FAILED}, True),
        ({"outcome": Outcome.LEFT}, True),
        ({"outcome": Outcome.WRONG_LENGTH}, False),
        ({"outcome": Outcome.UNREADABLE, "status": 500}, False),
        ({"outcome": Outcome.CLOSED}, False),
        ({"outcome": Outcome.UNREACHABLE}, False),
        ({"outcome": Outcome.TIMEOUT}, False),
        ({"planned": planned(malformed="cut off"), "outcome": Outcome.REFUSED, "status": 400}, True),
        ({"planned": planned(malformed="cut off"), "outcome": Outcome.REFUSED, "status": 500}, False),
        ({"planned": planned(malformed="cut off")}, False),
    ],
)
def test_a_server_does_its_duty_with_tokens_or_a_typed_error(fields: dict[str, object], answered: bool) -> None:
    one = record(0.0, 1.0, **fields)
    assert one.answered is answered
    assert LoadSummary("", [one, record(0.0, 1.0)], OBJECTIVE).answered == (1.0 if answered else 0.5)


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


def watch(growth: float, **fields: object) -> ServerMonitor:
    """A server of one process that has grown by so many bytes a second for a minute."""
    tree = ProcessTree.__new__(ProcessTree)
    tree.kinds = {psutil.Process(): "serve"}
    resident = [{"serve": int(1_000_000 + growth * max(0.5 * index, 30.0))} for index in range(121)]
    defaults = {"before": {"serve": 7}, "after": {"serve": 7}, "resident": resident}
    return ServerMonitor(tree, **{**defaults, **fields})


def verdicts(seen: ServerMonitor) -> dict[str, bool]:
    monitor = ClientMonitor([0.001], in_flight=1.0, seconds=1.0, cpu=0.1)
    run = LoadRun(LoadSummary("load", [record(0.0, 1.0)], SLO(1.0, 1.0)), monitor, 1, seen)
    return {target.name.partition(": ")[2].partition(",")[0]: target.met for target in load_report([run]).targets}


def test_gauges_are_read_by_name_and_label() -> None:
    assert parse_gauges(METRICS) == Gauges(running=2, waiting=3, used_pages=5, pages=64)
    assert not Gauges(running=2, waiting=3, used_pages=5, pages=64).idle
    assert Gauges(running=0, waiting=0, used_pages=0, pages=64).idle
    assert parse_gauges("# TYPE up gauge\nup 1.0\n") is None


def test_growth_is_that_of_the_second_half() -> None:
    growing = watch(1000.0)
    assert growing.growth(growing.total) == pytest.approx(30_000, rel=0.01)
    assert growing.growth([5] * 121) == pytest.approx(0.0, abs=1e-6)
    assert growing.growth([1, 2, 3]) is None


def test_leaks_miss_their_targets() -> None:
    idle = Gauges(running=0, waiting=0, used_pages=0, pages=64)
    assert all(verdicts(watch(0.0, gauges=idle)).values())
    assert not verdicts(watch(1000.0))["memory"]
    assert not verdicts(watch(0.0, after={"serve": 8}))["open files"]
    assert not verdicts(watch(0.0, gauges=Gauges(running=0, waiting=0, used_pages=1, pages=64)))["pages given back"]


def test_tables_have_a_cell_for_each_column_whatever_happened() -> None:
    monitor = ClientMonitor([0.001], in_flight=1.0, seconds=1.0, cpu=0.1)
    refused = record(0.0, ended=1.0, outcome=Outcome.REFUSED, status=503)
    wrong = record(0.0, ended=2.0, outcome=Outcome.REFUSED, status=400, planned=planned(malformed="cut off"))
    runs = [
        LoadRun(LoadSummary("1/s", [record(0.0, 1.0, 1.5)], SLO(1.0, 1.0)), monitor, 2, watch(0.0)),
        LoadRun(LoadSummary("2/s", [refused, wrong], SLO(1.0, 1.0)), monitor, 0, None),
    ]
    tables = load_report(runs).tables
    assert all(len(row) == len(table.columns) for table in tables for row in table.rows)
    throughput, first_token, _, answers, _, server = tables
    assert throughput.rows[0][1:] == [1 / 1.5, 2 / 1.5, 1 / 1.5, "100%"]
    assert first_token.rows[0][1] == 1000.0
    assert first_token.rows[1][1] == "–"
    assert list(answers.columns[3:]) == ["finished", "error body"]
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
