"""Chapters in which a reader changes a live object by hand, with the controls of `minisgl.book.live`."""

from __future__ import annotations

import ast
from pathlib import Path

import jupytext

CHAPTERS = Path(__file__).parents[2] / "chapters"


def calls_live(source: str) -> bool:
    """Whether a Python cell calls `live`; a mention in a comment or in a string is none."""
    calls = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(isinstance(called, ast.Name) and called.id == "live" for called in calls)


def test_at_least_four_chapters_have_controls_that_change_a_live_object() -> None:
    found = []
    for path in sorted(CHAPTERS.glob("[0-9][0-9]-*.md")):
        cells = jupytext.reads(path.read_text(encoding="utf-8"), fmt="md").cells
        if any(calls_live(cell.source) for cell in cells if cell.cell_type == "code"):
            found.append(path.stem[:2])
    assert len(found) >= 4, f"only chapters {found}"
    assert {"04", "06", "08", "09"} <= set(found)


def test_a_mention_is_no_call() -> None:
    assert calls_live("x = 1\nlive(draw, {})")
    assert not calls_live("# live(draw)\nsaid = 'live(draw)'\nscheduler.live(1)")
