"""Results that no notebook measures, traces beside results, and cells that need CUDA."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.report import Report, Table
from minisgl.errors import ConfigError
from minisgl.trace import HOST, Event, Trace
from minisgl.viz import has_cuda, kept, measured

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
TABLES = [Table("deaths, ms", ["killed", "ms"], [["serve, --restart", 12.345]])]


def a_trace() -> Trace:
    trace = Trace()
    trace.add(Event("launch", HOST, trace.start + 1.0, 0.5, {"step": 3}))
    return trace


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what a benchmark has written on a CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys.modules[measured.__module__], "RESULTS", tmp_path)
    path = tmp_path / "toy.json"
    Report("toy", {}, TABLES, [], traces={"on": a_trace(), "off": Trace()}).write(path, "python toy.py", 0.4)
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"date": "2026-11-21T07:09:52+00:00", "commit": "0123456789abcdef", "modified": False}
    record["hardware"] |= {"cpu": "some CPU", "cores": 2}
    path.write_text(json.dumps(record), encoding="utf-8")
    return tmp_path


def never() -> Report:
    raise AssertionError("there is no GPU to run on")


def test_a_kept_result_says_so_and_on_what_machine(results: Path) -> None:
    shown = kept("toy")
    assert not shown.live
    assert repr(shown) == (
        "*Kept: `python toy.py` measured this on some CPU (2 cores, load average 0.4 before) on 2026-11-21, at commit "
        "0123456.*\n\n**deaths, ms**\n\n| killed | ms |\n| --- | ---: |\n| serve, `--restart` | 12.3 |"
    )
    assert shown.rows("deaths") == [{"killed": "serve, --restart", "ms": 12.345}]


def test_a_kept_result_that_is_not_there(results: Path) -> None:
    with pytest.raises(ConfigError, match=r"no benchmarks/results/other\.json .* Run from a checkout"):
        kept("other")


def test_traces_are_written_beside_a_result_with_what_it_says_of_itself(results: Path) -> None:
    other = json.loads((results / "trace-toy-on.json").read_text(encoding="utf-8"))["otherData"]
    assert other["on_cuda"] is False
    assert (other["benchmark"], other["command"]) == ("toy", "python toy.py")
    assert {"date", "commit", "modified", "hardware", "versions"} <= other.keys()


@pytest.mark.parametrize("live", [False, True])
def test_traces_are_the_same_from_a_run_and_from_files(
    results: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: live)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(live))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    run = Report("toy", {}, TABLES, [], traces={"off": Trace(), "on": a_trace()})
    shown = measured("toy", lambda: run)
    assert list(shown.traces) == ["off", "on"]
    (event,) = shown.traces["on"].events
    assert (event.name, event.args) == ("launch", {"step": 3})
    assert event.duration == pytest.approx(0.5)


def test_the_origin_alone_is_displayed_with_the_mark(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    measured("toy", never).show_origin()
    (origin,) = displayed
    assert repr(origin).startswith("*No CUDA device here: `python toy.py` measured this on one some CPU on")
    assert repr(origin).endswith("0123456.*")
    _, metadata = origin._repr_mimebundle_()
    assert metadata["minisgl.measured"]["name"] == "toy"


def test_where_cuda_is_missing_one_line_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert not has_cuda("nothing is captured")
    assert capsys.readouterr().out == "No CUDA device here: nothing is captured.\n"
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    assert has_cuda("nothing is captured")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("name", ["off", "on"])
def test_the_kept_traces_name_the_run_that_they_are_from(name: str) -> None:
    result = json.loads((RESULTS / "overlap.json").read_text(encoding="utf-8"))
    other = json.loads((RESULTS / f"trace-overlap-{name}.json").read_text(encoding="utf-8"))["otherData"]
    for key in ("command", "date", "commit", "hardware"):
        assert other[key] == result[key]
