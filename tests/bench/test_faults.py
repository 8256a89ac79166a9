"""What the fault table makes of what followed a kill."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from minisgl.bench import processes
from minisgl.bench.client import Outcome
from minisgl.bench.processes import KillResult, fault_report
from tests.bench.scripted import record

KINDS = ("serve", "scheduler")


def killed(
    kind: str,
    *outcomes: Outcome,
    restart: bool = False,
    noticed: bool = True,
    left: tuple[str, ...] = (),
    told: float = 0.4,
    stopped: bool = False,
) -> KillResult:
    records = [record(0.0, ended=1.0, outcome=outcome) for outcome in outcomes]
    last = None if set(outcomes) == {Outcome.FINISHED} else told
    return KillResult(KINDS, kind, restart, records, last, "exit code 1", 0.2, noticed, list(left), stopped)


def verdicts(what: KillResult) -> list[bool]:
    return [target.met for target in fault_report([what]).targets]


def test_the_tables_count_outcomes_and_name_what_is_left() -> None:
    results = [
        killed("scheduler", Outcome.REFUSED, Outcome.FAILED, Outcome.FAILED),
        killed("serve", Outcome.CLOSED, Outcome.CLOSED, Outcome.FAILED, left=("process scheduler", "/dev/shm/x")),
    ]
    requests, servers = fault_report(results).tables
    assert list(requests.columns[2:-1]) == ["error body", "error event", "connection closed"]
    assert [list(row) for row in requests.rows] == [["scheduler", 3, 1, 2, 0, 0.4], ["serve", 3, 0, 1, 2, 0.4]]
    assert [row[-1] for row in servers.rows] == ["nothing", "process scheduler, /dev/shm/x"]


def test_a_kill_that_costs_nobody_anything_has_nobody_to_tell() -> None:
    harmless = killed("scheduler", Outcome.FINISHED, Outcome.FINISHED, restart=True)
    assert fault_report([harmless]).tables[0].rows == [["scheduler, --restart", 2, 2, "–"]]
    assert verdicts(harmless) == [True, True]


def test_a_process_that_stands_still_is_noticed_later() -> None:
    stopped = killed("scheduler", Outcome.FAILED, restart=True, stopped=True, told=4.5)
    assert fault_report([stopped]).tables[0].rows == [["scheduler, stopped, --restart", 1, 1, 4.5]]
    assert verdicts(stopped) == [True, True, True]
    assert verdicts(killed("scheduler", Outcome.FAILED, told=4.5)) == [True, False, True]
    assert verdicts(killed("scheduler", Outcome.FAILED, stopped=True, told=5.5)) == [True, False, True]


def test_who_can_be_told_must_be_told() -> None:
    assert verdicts(killed("scheduler", Outcome.REFUSED, Outcome.FINISHED)) == [True, True, True]
    assert verdicts(killed("scheduler", Outcome.REFUSED, Outcome.CLOSED)) == [False, True, True]
    assert verdicts(killed("serve", Outcome.CLOSED)) == [True, True]
    assert verdicts(killed("serve", Outcome.CLOSED, noticed=False)) == [True, False]
    assert verdicts(killed("serve", Outcome.CLOSED, left=("TMPDIR/x",))) == [True, False]


def test_memory_that_a_process_has_is_not_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others on the machine come and go with theirs while a server runs."""
    monkeypatch.setattr(processes, "_SHARED_MEMORY", tmp_path)
    (tmp_path / "before").write_bytes(bytes(8))
    before = processes._shared_memory()
    (tmp_path / "forgotten").write_bytes(bytes(8))
    (tmp_path / "in use").write_bytes(bytes(8))
    with (tmp_path / "in use").open("r+b") as file, mmap.mmap(file.fileno(), 8):
        assert processes._left_memory(before) == {tmp_path / "forgotten"}
    assert processes._left_memory(before) == {tmp_path / "forgotten", tmp_path / "in use"}
