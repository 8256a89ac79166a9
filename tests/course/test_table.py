"""The files of the course's table: what is read from them, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.book.course_table import CourseError, Mutant, load_table

TASK = 'title = "T"\n[[task]]\ntitle = "t"\nstubs = ["minisgl.a:f"]\ntests = ["tests/test_a.py"]\n'


def load(folder: Path, text: str, name: str = "03.toml") -> object:
    (folder / "reference.toml").write_text("reference = []")
    (folder / name).write_text(text, encoding="utf-8")
    return load_table(folder).task("3.1")


def test_a_task_has_what_its_file_says(tmp_path: Path) -> None:
    more = 'spec = """\nDo it.\n"""\nhint = "Try."\nmutants = [["a", "b"], ["c", "d", "forgets"]]'
    task = load(tmp_path, TASK + more)
    assert (task.id, task.spec, task.hint) == ("3.1", "Do it.", "Try.")
    assert task.mutants == (Mutant("a", "b"), Mutant("c", "d", "forgets"))


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (TASK + "mutant = []", "03.toml", "chapter 3, task 1: unknown entry 'mutant'; known ones are hint, mutants"),
        (TASK + 'mutants = [["a"]]', "03.toml", r"chapter 3, task 1: write a mutant as \[text, wrong text\]"),
        (TASK, "three.toml", "three.toml: name the file after its chapter's number"),
        (TASK.replace("a:f", "a.f"), "03.toml", "write 'minisgl.a.f' as module:function"),
        ("title =", "03.toml", "03.toml: Invalid value"),
        (TASK, "04.toml", "chapter 3 is not in the course"),
    ],
)
def test_what_is_wrong_is_named(text: str, name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(CourseError, match=message):
        load(tmp_path, text, name)
