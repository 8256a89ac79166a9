from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from minisgl.book.recorder import _frames


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
