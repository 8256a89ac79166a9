"""The proof of the course fails where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minisgl.course.errors import CourseError
from minisgl.course.sources import Sources, repository
from minisgl.course.table import Table, load_table
from tools.course import main, prove


def test_no_tasks_are_no_proof() -> None:
    table = load_table()
    bare = Table({number: replace(each, tasks=()) for number, each in table.chapters.items()}, table.tools, ())
    assert prove(Sources(repository(), bare), [each for each in bare.chapters.values() if each.tasks]) == [
        "the table has no tasks, so there is nothing to prove"
    ]


def test_a_chapter_without_tasks_is_told_from_one_that_is_not_there() -> None:
    table = load_table()
    bare = Table({**table.chapters, 2: replace(table.chapters[2], tasks=())}, table.tools, table.tool_tests)
    with pytest.raises(CourseError, match="chapter 2 has no tasks; choose one of 1, 3"):
        bare.chapter_with_tasks(2)


def test_an_unknown_chapter_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99"]) == 2
    assert "chapter 99 is not in the course" in capsys.readouterr().err


def test_a_table_that_is_wrong_is_found_out() -> None:
    """The table of chapter 1 with a test that needs no task, and with one that is not there."""
    table = load_table()
    one = table.chapters[1]
    needless = "tests/core/test_registry.py::test_a_name_is_taken_once"
    missing = "tests/core/test_table.py::test_admission_sets_every_length[of-nothing]"
    wrong = replace(one, tasks=(replace(one.tasks[1], number=1, tests=(needless, missing)),))
    sources = Sources(repository(), Table({**table.chapters, 1: wrong}, table.tools, table.tool_tests))
    problems = prove(sources, [wrong])
    assert f"chapter 1: in the starter, {needless} of task 1 passes" in problems
    assert f"chapter 1: {missing} of chapter 1, task 1 did not run" in problems
    assert not [problem for problem in problems if "in the snapshot" in problem]
