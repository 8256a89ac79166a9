"""The versions of decode attention that are timed beside each other. Nothing that was timed is asserted."""

from __future__ import annotations

import pytest
import torch

from minisgl.bench import attention_steps
from minisgl.bench.__main__ import main
from minisgl.bench.attention import Step, attend_calls, steps
from minisgl.bench.attention_steps import run_attention_steps, versions
from minisgl.errors import ConfigError

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


def test_without_a_gpu_there_is_nothing_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"attention-steps: .*CUDA"):
        main(["attention-steps"])


def timed_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(attention_steps, "copy_bandwidth", lambda: 4e12)
    monkeypatch.setattr(attention_steps, "measure", lambda step, heads, make, repeat: 100.0)
    monkeypatch.setattr(attention_steps, "flashinfer_obstacle", lambda kv_cache: "it is not installed")
    monkeypatch.setattr(attention_steps, "KVCache", lambda *sizes: None)


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
    monkeypatch.setattr(attention_steps, "steps", lambda: [Step("64 × 40", [1] * 64, [39] * 64)])
    for table in run_attention_steps(repeat=1).tables:
        assert all(isinstance(cell, float) and cell > 0 for row in table.rows for cell in row[1:3])
