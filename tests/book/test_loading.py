from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minisgl.book import file_map, memory_stages, watch_memory
from minisgl.errors import MiniSGLError
from tests.book.drawing import texts


def checkpoint(path: Path) -> Path:
    names = [f"model.layers.{layer}.{name}.weight" for layer in range(3) for name in ("up", "down")]
    tensors = {name: torch.zeros(30, 40) for name in names}
    save_file(tensors | {"model.norm.weight": torch.zeros(40)}, path / "model.safetensors", {"format": "pt"})
    return path / "model.safetensors"


def test_a_file_map_names_what_lies_where(tmp_path: Path) -> None:
    file = checkpoint(tmp_path)
    picture = file_map(file, "model.layers.1.")
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert f"model.safetensors: {file.stat().st_size:,} bytes, 7 tensors" in texts(picture)
    assert {"0", "1", "2", "up", "down"} <= set(texts(picture))
    first = 8 + header + 2 * 4 * 30 * 40
    assert f"model.layers.1.*: 2 tensors, bytes {first:,} to {first + 2 * 4 * 30 * 40:,}" in texts(picture)
    assert "model.layers.0., model.layers.1., model.layers.2., model.norm.weight" in picture.text


def grow(megabytes: str) -> Iterator[str]:
    from minisgl.errors import MiniSGLError

    yield "start"
    kept = [bytearray(b"x" * int(float(megabytes) * 1e6))]
    yield "first"
    kept.append(bytearray(b"y" * 50_000_000))
    yield "second"
    if float(megabytes) > 80:
        raise MiniSGLError("too much")


def test_memory_is_watched_stage_by_stage() -> None:
    run = watch_memory(grow, 40)
    assert list(run.stages) == ["first", "second"]
    assert run.stages["first"].own == pytest.approx(40, abs=5)
    assert run.stages["second"].own == pytest.approx(90, abs=5)
    assert run.peak >= 85
    assert run.error == ""
    assert {"1  first", "2  second"} <= set(texts(memory_stages(run, "Growing")))


def test_the_engines_errors_are_kept_and_others_are_shown() -> None:
    assert watch_memory(grow, 90).error == "too much"
    with pytest.raises(MiniSGLError, match="could not convert"):
        watch_memory(grow, "no number")
