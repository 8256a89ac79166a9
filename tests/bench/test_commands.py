"""The commands from end to end, on sizes that take no time. Nothing that was timed is asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl import demo
from minisgl.bench.__main__ import main
from tests.model_zoo import tiny_checkpoint
from tests.tokenizer.tiny import byte_level, save


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "result.json"
    main([*arguments, "--threads", "1", "--output", str(path)])
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return record


def test_cpu_measures_both_engines_on_the_same_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    sizes = ["--requests", "3", "--input-len", "20", "--output-len", "5", "--prefix-len", "100", "--repeat", "2"]
    record = bench(tmp_path, "cpu", "--model", str(model), *sizes)

    assert record["benchmark"] == "cpu"
    assert record["command"].startswith("python -m minisgl.bench cpu --model ")
    assert record["settings"]["requests"] == 3
    assert record["hardware"]["threads"] == 1
    assert all(len(samples) == 2 and min(samples) > 0 for samples in record["samples"].values())
    throughput, first_token = record["tables"]
    assert [row[0] for row in throughput["rows"]] == [3, 1]
    assert [row[-1] for row in throughput["rows"]] == ["6 of 6", "2 of 2"]  # same weights, same greedy tokens
    assert first_token["columns"][-1] == "cached / uncached"
    assert len(record["targets"]) == 3

    screen = capsys.readouterr().out
    assert "transformers" in screen
    assert len(re.findall(r"\b(?:met|missed by)\b", screen)) == 3


def test_host_measures_watched_and_unwatched_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--running", "2", "5", "--steps", "6", "--prefix-len", "64", "--page-size", "8"]
    record = bench(tmp_path, "host", *sizes)

    decode, prefill = record["tables"]
    assert [row[:2] for row in decode["rows"]] == [["unwatched", 2], ["unwatched", 5], ["watched", 2], ["watched", 5]]
    assert [row[0] for row in prefill["rows"]] == [1, 64]
    assert all(min(row[1:]) > 0 for row in [*decode["rows"], *prefill["rows"]])
    assert len(record["targets"]) == 4
    assert "decode step of 2 watched requests" in capsys.readouterr().out


def test_the_demo_answers_and_shows_which_prompts_were_cached(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = byte_level()
    model, _ = tiny_checkpoint(
        tmp_path, "LlamaForCausalLM", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=1024
    )
    save(tokenizer, model)
    demo.main(str(model))

    screen = capsys.readouterr().out
    assert "\n1. What is the capital of France?" in screen  # no escape sequence before it: this is no terminal
    assert max(map(len, screen.splitlines())) <= 80
    rows = [line.split() for line in screen.splitlines() if re.match(r"\s+\d+(\s+\d+){3}\s", line)]
    assert [int(row[0]) for row in rows] == list(range(1, 9))
    cached = [int(row[2]) for row in rows]
    assert cached[0] == 0
    assert cached[3] > 100  # the fourth question repeats the note of the third
