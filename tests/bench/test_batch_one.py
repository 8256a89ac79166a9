"""The benchmark of one request alone. Nothing that was timed is asserted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.bench import batch_one
from minisgl.bench.batch_one import repetition, run_batch_one
from minisgl.bench.report import Report
from minisgl.kernels import single_token_attention
from tests.kernels.closeness import DEVICE
from tests.model_zoo import tiny_checkpoint

DETAILED = [
    "plain kernels, in a graph",
    "torch.compile, in a graph",
    "+ sampler and inputs, fused",
    "single-token decoder, kernels in turn",
    "single-token decoder, kernels started early",
]


def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: tuple[int, ...]) -> Report:
    sizes = {"head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", max_position_embeddings=128, **sizes)
    monkeypatch.setattr(batch_one, "_TIMED_STEPS", 1)
    options = {"device": DEVICE, "dtype": "bfloat16", "max_seq_len": 128, "num_pages": 64}
    if DEVICE == "cpu":
        monkeypatch.setattr(torch, "compile", lambda model, dynamic: model)
        monkeypatch.setattr(single_token_attention, "MAX_SPLITS", 2)
        options |= {"prefill_attention": "torch", "decode_attention": "torch", "page_size": 4}
    return run_batch_one(str(path), options, lengths, repeat=1)


def test_every_version_is_timed_and_its_kernels_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(tmp_path, monkeypatch, (1, 9))
    ladder, *details = report.tables
    versions = [str(row[0]) for row in ladder.rows]
    assert set(DETAILED) < set(versions)
    assert all(isinstance(cell, float) and cell > 0 for row in ladder.rows for cell in row[2:])
    launched = {str(row[0]): row[1] for row in ladder.rows}
    if DEVICE == "cuda":
        graphs = details.pop()
        assert all(float(row[1]) >= 0 for row in graphs.rows)
    assert [table.title.split(": ")[1] for table in details] == [name for name in DETAILED for _ in range(2)]
    for table in details[::2]:
        assert sum(int(row[1]) for row in table.rows) == launched[table.title.split(": ")[1]]
        assert sum(float(row[4]) for row in table.rows) == pytest.approx(100)
    for table in details[1::2]:
        assert all(0 <= float(row[1]) <= float(row[2]) for row in table.rows)


def test_the_first_repetition_is_found_behind_what_comes_once() -> None:
    assert repetition(list("xyz" + "abcb" * 9 + "end")) == (3, 4)
    assert repetition(list("xbc" + "abc" * 6)) == (1, 3)
    assert repetition(list("abcdefgh")) == (0, 8)


@pytest.mark.gpu
def test_a_fused_step_has_fewer_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ladder = run(tmp_path, monkeypatch, (1, 9)).tables[0]
    launched = [int(row[1]) for row in ladder.rows if not str(row[0]).startswith(("torch.compile", "these"))]
    in_graphs = launched[1:]
    assert in_graphs == sorted(in_graphs, reverse=True)
    assert in_graphs[-1] == in_graphs[-2] < in_graphs[-3] < in_graphs[0] / 2
