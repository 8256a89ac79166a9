from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from IPython.core.formatters import DisplayFormatter

from minisgl.bench.report import Report, Table
from minisgl.book import has_cuda, kept, measured
from minisgl.errors import ConfigError, NotEnoughMemory
from minisgl.trace import HOST, Event, Trace

# -- measured --------------------------------------------------------------------------------------------------------

TABLES = [
    Table(
        "one kernel, µs", ["kernel", "MB", "fused"], [["norm", 0.05, 1.234], ["rope", 2, 12345.6], ["sort", 7, 999.6]]
    ),
    Table("whole layers", ["layer", "ms"], [["14B", 0.5]]),
]


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory of kept results, on a machine without a GPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys.modules[measured.__module__], "RESULTS", tmp_path)
    return tmp_path


@pytest.fixture
def record(results: Path) -> dict[str, Any]:
    """What `Report.write` writes of `TABLES`, but for the machine."""
    path = results / "toy.json"
    Report("toy", {}, TABLES, []).write(path, "python -m minisgl.bench toy", 0.0)
    written: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    written |= {"date": "2026-11-21T07:09:52+00:00", "commit": "0123456789abcdef", "modified": False}
    written["hardware"]["gpu"] = "NVIDIA H200"
    path.write_text(json.dumps(written), encoding="utf-8")
    return written


def never() -> Report:
    raise AssertionError("there is no GPU to run on")


def test_without_a_gpu_the_kept_result_is_shown_and_says_so(record: dict[str, Any]) -> None:
    shown = measured("toy", never)
    assert not shown.live
    assert repr(shown) == (
        "*No CUDA device here: `python -m minisgl.bench toy` measured this on one NVIDIA H200 on 2026-11-21, at commit "
        "0123456.*\n\n"
        "**one kernel, µs**\n\n"
        "| kernel | MB | fused |\n| --- | ---: | ---: |\n"
        "| norm | 0.0500 | 1.23 |\n| rope | 2 | 12,346 |\n| sort | 7 | 1,000 |\n\n"
        "**whole layers**\n\n| layer | ms |\n| --- | ---: |\n| 14B | 0.500 |"
    )


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"commit": None, "modified": None}, "at commit unknown."),
        ({"modified": True}, "at commit 0123456 and changes."),
        ({"hardware": {"cpu": "some CPU"}}, "on one some CPU on"),
    ],
)
def test_what_the_record_does_not_know_is_not_hidden(
    results: Path, record: dict[str, Any], change: dict[str, Any], told: str
) -> None:
    (results / "toy.json").write_text(json.dumps(record | change), encoding="utf-8")
    assert told in measured("toy", never).origin


def test_with_a_gpu_it_is_run(results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    shown = measured("toy", lambda: Report("toy", {}, TABLES, []))
    assert shown.live
    assert repr(shown).startswith(
        "*Measured just now, on this machine's NVIDIA H200.*\n\n**one kernel, µs**\n\n| kernel"
    )


def test_too_few_gpus_are_none(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA H200")
    shown = measured("toy", never, gpus=4)
    assert not shown.live
    assert shown.origin == (
        "Fewer than 4 CUDA devices here: `python -m minisgl.bench toy` measured this on 4 NVIDIA H200s on 2026-11-21, "
        "at commit 0123456."
    )
    assert measured("toy", lambda: Report("toy", {}, TABLES, []), gpus=2).live


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), NotEnoughMemory("not one page fits")])
def test_what_a_gpu_has_no_memory_for_is_read(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "RTX 4060")

    def too_large() -> Report:
        raise error

    shown = measured("toy", too_large)
    assert not shown.live
    assert shown.origin.startswith(
        "Not enough memory on this machine's RTX 4060: `python -m minisgl.bench toy` measured"
    )


def test_any_other_error_of_a_run_is_raised(record: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    with pytest.raises(AssertionError, match="no GPU to run on"):
        measured("toy", never)


@pytest.mark.parametrize("live", [False, True])
def test_rows_are_the_same_from_a_run_and_from_a_file(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: live)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(live))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    shown = measured("toy", lambda: Report("toy", {}, TABLES, []))
    assert shown.rows("kernel") == [
        {"kernel": "norm", "MB": 0.05, "fused": 1.234},
        {"kernel": "rope", "MB": 2, "fused": 12345.6},
        {"kernel": "sort", "MB": 7, "fused": 999.6},
    ]


def test_a_title_that_is_not_there_or_not_clear(record: dict[str, Any]) -> None:
    shown = measured("toy", never)
    with pytest.raises(ConfigError, match="'x': 'one kernel, µs', 'whole layers'"):
        shown.show("x")
    with pytest.raises(ConfigError, match="part of several titles: 'one kernel, µs', 'whole layers'"):
        shown.rows("e")


def test_without_a_result_the_error_says_what_to_do(results: Path) -> None:
    with pytest.raises(ConfigError, match=r"no benchmarks/results/toy\.json .* Run from a checkout .* as many GPUs"):
        measured("toy", never)


def test_show_displays_the_chosen_tables_and_the_mark(
    record: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    measured("toy", never).show("whole")
    data, metadata = DisplayFormatter().format(displayed[0])
    assert data["text/markdown"] == data["text/plain"]
    assert "**whole layers**" in data["text/markdown"]
    assert "one kernel" not in data["text/markdown"]
    assert metadata["minisgl.measured"]["name"] == "toy"
    assert metadata["minisgl.measured"]["live"] is False
    assert metadata["minisgl.measured"]["origin"].startswith("No CUDA device here")
    assert capsys.readouterr().out == ""


# -- kept ------------------------------------------------------------------------------------------------------------

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
KEPT_TABLES = [Table("deaths, ms", ["killed", "ms"], [["serve, --restart", 12.345]])]


def a_trace() -> Trace:
    trace = Trace()
    trace.add(Event("launch", HOST, trace.start + 1.0, 0.5, {"step": 3}))
    return trace


@pytest.fixture
def kept_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with what a benchmark has written on a CPU."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(sys.modules[measured.__module__], "RESULTS", tmp_path)
    path = tmp_path / "toy.json"
    Report("toy", {}, KEPT_TABLES, [], traces={"on": a_trace(), "off": Trace()}).write(path, "python toy.py", 0.4)
    record = json.loads(path.read_text(encoding="utf-8"))
    record |= {"date": "2026-11-21T07:09:52+00:00", "commit": "0123456789abcdef", "modified": False}
    record["hardware"] |= {"cpu": "some CPU", "cores": 2}
    path.write_text(json.dumps(record), encoding="utf-8")
    return tmp_path


def test_an_older_result_says_nothing_of_the_load(kept_results: Path) -> None:
    path = kept_results / "toy.json"
    record = json.loads(path.read_text(encoding="utf-8"))
    del record["hardware"]["load_average_before"]
    path.write_text(json.dumps(record), encoding="utf-8")
    assert "measured this on some CPU (2 cores) on 2026-11-21" in kept("toy").origin


def test_a_kept_result_says_so_and_on_what_machine(kept_results: Path) -> None:
    shown = kept("toy")
    assert not shown.live
    assert repr(shown) == (
        "*Kept: `python toy.py` measured this on some CPU (2 cores, load average 0.4 before) on 2026-11-21, at commit "
        "0123456.*\n\n**deaths, ms**\n\n| killed | ms |\n| --- | ---: |\n| serve, `--restart` | 12.3 |"
    )
    assert shown.rows("deaths") == [{"killed": "serve, --restart", "ms": 12.345}]


def test_a_kept_result_that_is_not_there(kept_results: Path) -> None:
    with pytest.raises(ConfigError, match=r"no benchmarks/results/other\.json .* Run from a checkout"):
        kept("other")


def test_traces_are_written_beside_a_result_with_what_it_says_of_itself(kept_results: Path) -> None:
    other = json.loads((kept_results / "trace-toy-on.json").read_text(encoding="utf-8"))["otherData"]
    assert other["on_cuda"] is False
    assert (other["benchmark"], other["command"]) == ("toy", "python toy.py")
    assert {"date", "commit", "modified", "hardware", "versions"} <= other.keys()


@pytest.mark.parametrize("live", [False, True])
def test_traces_are_the_same_from_a_run_and_from_files(
    kept_results: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: live)
    monkeypatch.setattr("torch.cuda.device_count", lambda: int(live))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "GPU")
    run = Report("toy", {}, KEPT_TABLES, [], traces={"off": Trace(), "on": a_trace()})
    shown = measured("toy", lambda: run)
    assert list(shown.traces) == ["off", "on"]
    (event,) = shown.traces["on"].events
    assert (event.name, event.args) == ("launch", {"step": 3})
    assert event.duration == pytest.approx(0.5)


def test_the_origin_alone_is_displayed_with_the_mark(kept_results: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    displayed: list[Any] = []
    monkeypatch.setattr("IPython.display.display", displayed.append)
    measured("toy", never).show_origin()
    (origin,) = displayed
    assert repr(origin).startswith("*No CUDA device here: `python toy.py` measured this on one some CPU on")
    assert repr(origin).endswith("0123456.*")
    _, metadata = origin._repr_mimebundle_()
    assert metadata["minisgl.measured"]["name"] == "toy"


def test_the_origin_is_what_print_shows(kept_results: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Without Markdown's marks, which a terminal would show."""
    print(measured("toy", never))
    said = capsys.readouterr().out
    assert said.startswith("No CUDA device here: python toy.py measured this on one some CPU on")
    assert said.endswith("0123456.\n")


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
