"""The steps and the versions of decode attention that are timed. Nothing that was timed is asserted."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.bench import attention
from minisgl.bench.__main__ import main
from minisgl.bench.attention import Step, attend_calls, paged, run_attention_steps, steps, versions
from tests.steps import CPU


def test_floors_count_what_must_be_read_and_multiplied() -> None:
    decode = Step("", [1, 1, 1], [39, 39, 19], shared=16)
    assert decode.decodes
    assert decode.kv_tokens == 40 + 24 + 4
    prefill = Step("", [3, 1], [2, 0])
    assert not prefill.decodes
    assert prefill.flops(heads=2) == 4 * 2 * 128 * (3 + 4 + 5 + 1)


def test_rows_share_their_prefix_and_no_other_page() -> None:
    cache, batch, inputs = paged(Step("", [1, 1, 1], [100, 70, 64], shared=64), 1, CPU)
    table = inputs.page_table.numpy()
    assert (table[:3, :4] == table[0, :4]).all()
    own = np.concatenate([table[0, :7], table[1, 4:5], table[2, 4:5]])
    assert sorted(own.tolist()) == list(range(cache.num_pages))
    assert batch.num_decode == 3
    assert len(batch.page_index) == 7 + 5 + 5
    assert inputs.out_locs.tolist() == [table[0, 6] * 16 + 4, table[1, 4] * 16 + 6, table[2, 4] * 16]


def test_every_kind_of_step_is_timed() -> None:
    names = [(step.decodes, step.name) for step in steps()]
    assert len(set(names)) == len(names)
    assert {step.decodes for step in steps()} == {True, False}
    assert all(max(step.cached) >= step.shared for step in steps())


@pytest.mark.parametrize("command", ["attention", "attention-steps"])
def test_without_a_gpu_there_is_nothing_to_time(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([command])
    assert f"{command}: times of GPU kernels need a CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_the_table_has_every_backend_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minisgl.bench.attention.steps", lambda: [Step("1 × 40", [1], [39]), Step("2 × 20", [20, 20], [0, 0])]
    )
    path = tmp_path / "result.json"
    main(["attention", "--repeat", "1", "--output", str(path)])
    text = path.read_text(encoding="utf-8")
    assert all(f"{name}, µs" in text for name in ("torch", "triton", "cascade"))


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def test_all_versions_compute_the_same() -> None:
    step = Step("", [1, 1], [30, 90])
    outputs = []
    for make in versions().values():
        torch.manual_seed(0)
        _, calls = attend_calls(step, 16, make, 1, DEVICE)
        outputs.append(calls[0]())
    assert len(outputs) == 5
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=0, atol=0.02)


def timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("minisgl.bench.gpu.copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(attention, "measure", lambda step, heads, make, repeat: 100.0)
    monkeypatch.setattr(attention, "flashinfer_obstacle", lambda kv_cache: "it is not installed")
    monkeypatch.setattr(attention, "KVCache", lambda *sizes: None)


def test_each_step_has_a_table_with_every_version(monkeypatch: pytest.MonkeyPatch) -> None:
    timed_without_a_gpu(monkeypatch)
    report = run_attention_steps(repeat=1)
    *tables, groups = report.tables
    alone = [step for step in steps() if step.decodes and step.shared == 0]
    assert len(tables) == len(alone) == 5
    for table, step in zip(tables, alone, strict=True):
        assert table.title.startswith(f"{step.name}: ")
        assert [row[0] for row in table.rows] == list(versions())
        moved = step.kv_tokens * 2 * 8 * 128 * 2
        assert table.rows[0][1:] == [100.0, moved / 1e5, f"{moved / 4e12 / 1e-4:.0%}"]
    assert [row[:2] for row in groups.rows] == [[group, float(group)] for group in (1, 2, 4, 8, 16)]
    assert report.settings["left_out"] == {"flashinfer": "it is not installed"}


@pytest.mark.gpu
def test_every_version_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "steps", lambda: [Step("64 × 40", [1] * 64, [39] * 64)])
    for table in run_attention_steps(repeat=1).tables:
        assert all(isinstance(cell, float) and cell > 0 for row in table.rows for cell in row[1:3])
