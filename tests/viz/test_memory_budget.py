from __future__ import annotations

import re
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from minisgl import LLM
from minisgl.errors import ConfigError
from minisgl.viz import engine_memory, memory_budget
from minisgl.viz.svg import WIDTH
from tests.tiny_text_model import text_checkpoint
from tests.viz.drawing import assert_sound, boxes, texts

GIB = 2**30


def test_the_bar_is_cut_in_proportion_and_what_is_left_is_free() -> None:
    picture = memory_budget({"weights": 15 * GIB, "KV <pages>": 45 * GIB}, 80 * GIB, "H200")
    bar = [box for box in boxes(picture) if box.get("height") == "40"]
    assert [float(box.get("width", "")) / (WIDTH - 28) for box in bar] == pytest.approx(
        [15 / 80, 45 / 80, 20 / 80], 1e-3
    )
    assert [(float(box.get("x", "")) - 14) / (WIDTH - 28) for box in bar] == pytest.approx([0, 15 / 80, 60 / 80], 1e-3)
    assert texts(picture)[:2] == ["H200", "80.00 GiB"]
    listed = texts(picture)[2:]
    for entry in (
        ["1", "weights", "15.00 GiB", "18.8 %"],
        ["2", "KV <pages>", "45.00 GiB", "56.2 %"],
        ["3", "free", "20.00 GiB", "25.0 %"],
    ):
        start = listed.index(entry[1]) - 1
        assert listed[start : start + 4] == entry
        assert f"{entry[0]}. {entry[1]}: {entry[2]}, {entry[3]}." in picture.text
    assert listed.count("1") == listed.count("2") == listed.count("3") == 2
    assert_sound(picture)


def test_small_parts_have_their_numbers_above_the_bar_and_apart() -> None:
    parts = {name: size for name, size in zip("abcdefgh", [500, 1, 1, 1, 0, 1, 1, 400], strict=True)}
    picture = memory_budget(parts, 1000)
    assert_sound(picture)
    above = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="51" ', picture.svg)]
    assert len(above) == 5
    assert all(right - left >= 20 for left, right in pairwise(above))


def test_units() -> None:
    picture = memory_budget({"a": 1, "b": 1023, "c": 1024, "d": 3 * 2**20, "e": 2**40}, 5 * 2**40)
    assert {"1 byte", "1023 bytes", "1.00 KiB", "3.00 MiB", "1.00 TiB", "5.00 TiB"} <= set(texts(picture))


@pytest.mark.parametrize(("parts", "total"), [({"a": 11}, 10), ({"a": -1}, 10), ({}, 0)])
def test_what_does_not_fit_is_refused(parts: dict[str, int], total: int) -> None:
    with pytest.raises(ConfigError, match="fit into"):
        memory_budget(parts, total)


def test_nothing_and_all_in_use() -> None:
    assert texts(memory_budget({}, 8))[-4:] == ["free", "8 bytes", "100.0 %", "1"]
    assert_sound(memory_budget({}, 8))
    assert len(boxes(memory_budget({"a": 8}, 8))) == 3


def test_the_memory_of_an_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(text_checkpoint(tmp_path), page_size=4, num_pages=8, device="cpu")
    module = sys.modules["minisgl.viz.memory_budget"]  # the package's name is the function
    monkeypatch.setattr(module, "total_memory", lambda device: 10_000_000)
    monkeypatch.setattr(module, "free_memory", lambda device: 9_000_000)
    text = engine_memory(llm).text
    kv_bytes = 9 * llm.engine.page_bytes
    size = f"{kv_bytes / 1024:.2f} KiB" if kv_bytes >= 1024 else f"{kv_bytes} bytes"
    assert f"KV cache: 8 pages of 4 tokens, and the dummy page: {size}" in text
    assert f"weights: {llm.engine.model_bytes / 1024:.2f} KiB" in text
    rest = 1_000_000 - llm.engine.model_bytes - kv_bytes
    assert rest > 0
    assert f"all else in use: activations, tables, other programs: {rest / 1024:.2f} KiB" in text
    assert "4. free: 8.58 MiB" in text
    assert "CUDA" not in text
    llm.engine.runner_bytes = 2048
    assert "3. CUDA graphs and their buffers: 2.00 KiB" in engine_memory(llm).text
    monkeypatch.setattr(module, "free_memory", lambda device: 10_000_000)
    assert "other programs: 0 bytes" in engine_memory(llm).text
