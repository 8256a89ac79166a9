from __future__ import annotations

import json
from pathlib import Path

import pytest

from minisgl.bench.workloads import STAGES
from minisgl.book import architecture, scoreboard, you_are_here
from minisgl.book.overview import PARTS
from minisgl.errors import ConfigError
from tests.book.drawing import assert_sound, boxes, texts


def test_every_part_is_drawn_with_the_chapters_that_build_it() -> None:
    picture = architecture()
    assert_sound(picture)
    assert {part.label for part in PARTS.values()} <= set(texts(picture))
    assert texts(picture).count("chapters 6, 7") == 1
    assert not [box for box in boxes(picture) if box.get("fill")]


def test_the_parts_of_a_chapter_are_filled_and_named() -> None:
    picture = you_are_here(9)
    assert_sound(picture)
    assert [float(box.get("x", "")) for box in boxes(picture) if box.get("fill")] == [
        PARTS["scheduler"].x,
        PARTS["kvcache"].x,
    ]
    assert "You are here: Scheduler, KV pages" in texts(picture)
    assert picture.text.endswith("You are here: Scheduler, KV pages.")


def test_every_chapter_but_the_first_has_a_part() -> None:
    assert you_are_here(0) == architecture()
    assert [chapter for chapter in range(1, 21) if you_are_here(chapter) == architecture()] == []


def test_an_unknown_part_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match="no part 'cash'; choose from request, tokenizer"):
        architecture("cash")


def write(results: Path, name: str, machine: dict[str, object], speeds: dict[str, tuple[float, float, float]]) -> None:
    record = {
        "command": "python -m minisgl.bench scoreboard",
        "date": "2026-11-23T10:00:00+00:00",
        "commit": "0123456789",
        "hardware": {"cores": 2, "load_average_before": 0.5, **machine},
        "tables": [
            {"title": "default, output tokens/s", "columns": [], "rows": [[1, key, *s] for key, s in speeds.items()]}
        ],
    }
    (results / f"{name}.json").write_text(json.dumps(record))


def test_the_scoreboard_goes_as_far_as_the_chapter(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module in ("overview", "tables"):
        monkeypatch.setattr(f"minisgl.book.{module}.RESULTS", tmp_path)
    loop, cached, engine = (label for _, label, _ in STAGES[:3])
    write(
        tmp_path,
        "scoreboard",
        {"cpu": "a small CPU"},
        {loop: (1.25, 1.0, 1.5), cached: (12, 11, 13), engine: (123.4, 99, 1250)},
    )
    lines = scoreboard(5).text.splitlines()
    assert lines[0] == "| chapter | what runs | CPU: default, output tokens/s | GPU, output tokens/s |"
    assert lines[2] == f"| 1 | {loop} | 1.25 (1.00 to 1.50) | not measured yet |"
    assert lines[4] == f"| 5 | {engine} | 123 (99.0 to 1,250) | not measured yet |"
    assert lines[5] == ""
    assert "`python -m minisgl.bench scoreboard` measured this on a small CPU (2 cores" in lines[6]
    assert len(scoreboard(1).text.splitlines()) == len(lines) - 1
    write(tmp_path, "scoreboard-gpu", {"cpu": "x", "gpu": "NVIDIA H200"}, {engine: (900, 800, 1000)})
    lines = scoreboard(5).text.splitlines()
    assert lines[2].endswith("| – |")
    assert lines[4].endswith("| 900 (800 to 1,000) |")
    assert "NVIDIA H200" in lines[-1]
