"""The steps that the attention benchmark times, and its floors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.bench.__main__ import main
from minisgl.bench.attention import Step, paged, steps
from minisgl.errors import ConfigError
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


def test_without_a_gpu_there_is_nothing_to_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"attention: .*CUDA"):
        main(["attention"])


@pytest.mark.gpu
def test_the_table_has_every_backend_that_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "minisgl.bench.attention.steps", lambda: [Step("1 × 40", [1], [39]), Step("2 × 20", [20, 20], [0, 0])]
    )
    path = tmp_path / "result.json"
    main(["attention", "--repeat", "1", "--output", str(path)])
    text = path.read_text(encoding="utf-8")
    assert all(f"{name}, µs" in text for name in ("torch", "triton", "cascade"))
