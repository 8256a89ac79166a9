"""What is kept in ``benchmarks/results`` says where it comes from, by commands that can still be typed."""

from __future__ import annotations

import json
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.__main__ import build_parser
from minisgl.book import RESULTS

RECORDS = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
TRACES = [name for name, record in RECORDS.items() if "traceEvents" in record]
"""Excerpts that the benchmark ``overlap`` writes beside its result."""
BENCHMARKS = [name for name in RECORDS if name not in (*TRACES, "gpu-tests")]


def commands_of(record: dict[str, Any]) -> list[list[str]]:
    """Words of each command; of several, the runs were put together."""
    return [shlex.split(command) for command in record["command"].split(";")]


def test_every_file_is_of_a_kind_that_is_known() -> None:
    assert len(BENCHMARKS) > 15
    assert TRACES == ["trace-overlap-off", "trace-overlap-on"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_result_names_its_hardware_versions_and_commit(name: str) -> None:
    record = RECORDS[name]
    assert {"cpu", "cores", "memory_bytes", "system"} <= set(record["hardware"])
    assert {"python", "torch", "transformers", "numpy"} <= set(record["versions"])
    if "gpu" in record["hardware"]:
        assert {"gpu_memory_bytes", "driver"} <= set(record["hardware"])
        assert {"cuda", "triton", "flashinfer-python"} <= set(record["versions"])
    assert len(record["commit"]) == 40
    assert isinstance(record["modified"], bool)
    assert record["date"]
    assert record["tables"]


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_command_of_a_result_can_be_typed_today(name: str) -> None:
    for words in commands_of(RECORDS[name]):
        assert words[:2] == ["python", "-m"]
        if words[2].startswith("tools."):  # a program of the repository's, with a result of its own
            assert find_spec(words[2]) is not None
            continue
        assert words[2] == "minisgl.bench"
        options = build_parser(words[3]).parse_args(words[3:])
        assert options.benchmark == RECORDS[name]["benchmark"]


def test_runs_of_the_gpu_tests_name_files_that_are_there() -> None:
    record = RECORDS["gpu-tests"]
    assert {"gpu", "memory_bytes"} <= set(record["hardware"])
    assert {"python", "torch", "triton"} <= set(record["versions"])
    for run in record["runs"]:
        command, *words = shlex.split(run["command"])
        assert command == "pytest"
        assert len(run["commit"]) == 40
        paths = [word for word in words if word.startswith("tests/")]
        assert paths
        assert all((Path(RESULTS).parent.parent / path).exists() for path in paths)
