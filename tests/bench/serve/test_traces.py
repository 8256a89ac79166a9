"""Both formats of traces, and what is wrong with lines that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minisgl.bench.serve.errors import LoadError
from minisgl.bench.serve.traces import Blocks, TraceRequest, read_trace

EXAMPLES = Path(__file__).parents[3] / "benchmarks" / "traces"
MOONCAKE = {"timestamp": 1500, "input_length": 600, "output_length": 7, "hash_ids": [0, 9]}
QWEN = {
    "chat_id": 5,
    "parent_chat_id": -1,
    "timestamp": 2.5,
    "input_length": 33,
    "output_length": 4,
    "type": "text",
    "turn": 1,
    "hash_ids": [7, 8, 3],
}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    trace = path / "trace.jsonl"
    trace.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return trace


def test_mooncake_counts_in_milliseconds_and_blocks_of_512(tmp_path: Path) -> None:
    second = {**MOONCAKE, "timestamp": 2000, "input_length": 1024, "hash_ids": [0, 1]}
    assert read_trace(write(tmp_path, MOONCAKE, second)) == [
        TraceRequest(1.5, 600, 7, Blocks((0, 9), 512)),
        TraceRequest(2.0, 1024, 7, Blocks((0, 1), 512)),
    ]


def test_qwen_counts_in_seconds_and_blocks_of_16(tmp_path: Path) -> None:
    second = {
        **QWEN,
        "chat_id": 6,
        "parent_chat_id": 5,
        "turn": 2,
        "hash_ids": [7, 8],
    }  # without the block that is not full
    assert read_trace(write(tmp_path, QWEN, second)) == [
        TraceRequest(2.5, 33, 4, Blocks((7, 8, 3), 16)),
        TraceRequest(2.5, 33, 4, Blocks((7, 8), 16)),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ("[]", "object"),
        ({**MOONCAKE, "input_length": 0}, r"\$\.input_length"),
        ({**MOONCAKE, "output_length": "7"}, r"\$\.output_length"),
        ({**MOONCAKE, "timestamp": -1}, r"\$\.timestamp"),
        ({**MOONCAKE, "hash_ids": [-4, 5]}, r"\$\.hash_ids"),
        ({key: value for key, value in MOONCAKE.items() if key != "hash_ids"}, "hash_ids"),
        ({**MOONCAKE, "priority": 3}, "priority"),
        ({**MOONCAKE, "hash_ids": [1, 2, 3]}, "has 3 blocks, but 600 tokens of input_length are 2 blocks of 512"),
        ({**MOONCAKE, "hash_ids": []}, "has 0 blocks"),
        ({**MOONCAKE, "timestamp": 1000}, "sort the trace"),
        (QWEN, "chat_id"),
    ],
)
def test_a_line_that_is_wrong_is_named_by_its_number(tmp_path: Path, line: Any, message: str) -> None:
    trace = write(tmp_path, MOONCAKE, MOONCAKE, line)
    with pytest.raises(LoadError, match=rf"trace\.jsonl, line 3: .*{message}"):
        read_trace(trace)


def test_a_trace_that_is_not_there_or_empty(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match=r"missing\.jsonl: cannot be read"):
        read_trace(tmp_path / "missing.jsonl")
    with pytest.raises(LoadError, match="at least one request"):
        read_trace(write(tmp_path))
