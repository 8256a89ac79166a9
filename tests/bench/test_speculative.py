"""The benchmark of speculative decoding. Nothing that was timed is asserted."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from minisgl.batch import Batch, build_batch
from minisgl.bench import speculative
from minisgl.bench.speculative import RightWithChance, run_speculative
from minisgl.config import EngineConfig
from minisgl.drafters.protocol import DraftRow, DraftTarget
from tests.tiny_text_model import text_checkpoint

OPTIONS = {"device": "cpu", "num_pages": 256, "page_size": 4, "max_seq_len": 200}


def test_drafts_are_right_as_often_as_they_should_be() -> None:
    drafter = RightWithChance(DraftTarget(EngineConfig(), 100, 8, 64))
    row = DraftRow(0, 0, np.zeros(3, dtype=np.int32), 8)
    for chance in (0.0, 0.8, 1.0):
        drafter.chance = chance
        drafts = np.concatenate([drafter.propose([row])[0] for _ in range(500)])
        assert np.mean(drafts == 0) == pytest.approx(chance, abs=0.02)


def test_each_chance_and_number_of_requests_has_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "_PROMPT_LEN", 4)
    monkeypatch.setattr(speculative, "_OUTPUT_LEN", 12)
    path = text_checkpoint(tmp_path, max_position_embeddings=256)
    report = run_speculative(str(path), OPTIONS, (1, 3), chances=(0.0, 0.9), draft_tokens=2, costs=(1, 4), repeat=1)
    table, steps = report.tables
    assert [row[:2] for row in table.rows] == [
        [name, count] for name in ("none", "right with 0", "right with 0.9") for count in (1, 3)
    ]
    assert [float(row[6]) for row in table.rows[2:4]] == [0.0, 0.0]
    assert all(0 < float(row[6]) <= 2 for row in table.rows[4:])
    assert [row[:2] for row in steps.rows] == [[count, drafts] for drafts in (0, 1, 4) for count in (1, 3)]
    assert all(row[5] == "–" or float(row[5]) > 0 for row in steps.rows)
    assert all(float(row[5]) == 1.0 for row in steps.rows[:2])
    assert len(report.targets) == 1 + (steps.rows[-2][5] != "–")
    assert all(len(values) == 1 for values in report.samples.values())


def test_published_figures_say_where_they_are_from_and_add_up() -> None:
    file = Path(__file__).parents[2] / "benchmarks" / "reference" / "speculative.json"
    rows = json.loads(file.read_text(encoding="utf-8"))["rows"]
    for row in rows:
        assert {"drafts from", "source", "engine", "speed-up", "figures"} <= row.keys()
        assert row["source"].startswith("https://")
        if rates := re.match(r"([\d.]+) tokens/s over ([\d.]+);", row["figures"]):
            assert f"{float(rates[1]) / float(rates[2]):.2f}" == row["speed-up"]
    assert sum("tokens/s over" in row["figures"] for row in rows) == 2


def test_a_period_is_that_of_steps_of_one_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([1.0, 3.0, 6.0, 7.0, 8.5, 100.0])
    monkeypatch.setattr(speculative.time, "perf_counter", lambda: next(clock))
    periods = speculative._StepPeriods()
    decode, drafts, prefill = (step(1), step(1, 2), step(5, prefill=True))
    for batch in (decode, decode, drafts, drafts, drafts, prefill):
        periods.end("launch", batch)
        periods.end("process", batch)
    assert periods.seconds == {False: [2.0], True: [1.0, 1.5]}


def step(fed: int, drafts: int = 0, prefill: bool = False) -> Batch:
    table = np.arange(64, dtype=np.int32).reshape(4, 16)
    one = np.ones(1, dtype=np.int32)
    rows = np.zeros(1 + drafts, dtype=np.int32)
    guesses = np.zeros(drafts, dtype=np.int32)
    return build_batch(0 * one, (fed + drafts) * one, 9 * one, table, 1, rows, rows, int(not prefill), drafts=guesses)


def test_the_edited_text_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculative, "_TEXT", "a cat")
    monkeypatch.setattr(speculative, "_TASKS", ("12 of them:",))
    path = text_checkpoint(tmp_path, max_position_embeddings=256)
    report = run_speculative(str(path), OPTIONS, repeat=1, edit=True)
    assert [row[0] for row in report.tables[0].rows] == ["none", "ngram", "suffix"]
    assert [target.limit for target in report.targets] == [1.8]
