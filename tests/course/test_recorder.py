from __future__ import annotations

import runpy
import sys
from pathlib import Path

import numpy as np
import pytest

from minisgl.book.recorder import _equation, _frames


def test_frames_are_those_of_the_folder_without_its_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pytest itself is in the environment: a failure has some thirty frames of it, each a file to be parsed."""
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "theirs.py").write_text("def call(function):\n    return function()\n")
    (tmp_path / "mine.py").write_text("def broken():\n    return (\n        1 / 0\n    )\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    call = runpy.run_path(str(tmp_path / ".venv" / "theirs.py"))["call"]
    with pytest.raises(ZeroDivisionError) as error:
        call(runpy.run_path(str(tmp_path / "mine.py"))["broken"])
    assert len(error.traceback) == 3
    assert _frames(error) == [("mine.py", 3, "return (\n        1 / 0\n    )")]


@pytest.mark.parametrize(
    ("left", "right", "lines"),
    [
        ([9, 8], [4, 8], ["got       [9, 8]", "expected  [4, 8]"]),
        (
            [*range(8), 9],
            [*range(9)],
            [f"got       {[*range(8), 9]}", f"expected  {[*range(9)]}", "they differ at index 8 first: 9, expected 8"],
        ),
        (
            [*range(8)],
            [*range(9)],
            [f"got       {[*range(8)]}", f"expected  {[*range(9)]}", "the one has 8 items, the other 9"],
        ),
        (
            {"a": 1, "b": None},
            {"a": 1, "c": 2},
            ["got       {'a': 1, 'b': None}", "expected  {'a': 1, 'c': 2}", "they differ at  ['c', 'b']"],
        ),
        ({1, 2}, {2, 3}, ["got       {1, 2}", "expected  {2, 3}", "missing   [3]", "too many  [1]"]),
        ("a" * 300, "b", [f"got       '{'a' * 99} … {'a' * 55}'", "expected  'b'"]),
        (0.1, pytest.approx(0.2), None),
        ([np.zeros(2)] * 6, [np.zeros(2)] * 6, None),
    ],
)
def test_an_equation_says_what_was_got_and_what_was_expected(
    left: object, right: object, lines: list[str] | None
) -> None:
    assert _equation(left, right) == lines
