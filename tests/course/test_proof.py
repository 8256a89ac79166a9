"""The proof of the course fails where it should."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minisgl.book.course_table import Chapter, CourseError, Stub, Table, load_table
from minisgl.book.starters import Sources, repository
from tools.course import main, prove


def test_no_tasks_are_no_proof() -> None:
    table = load_table()
    bare = Table({number: replace(each, tasks=()) for number, each in table.chapters.items()}, ())
    assert prove(Sources(repository(), bare), [each for each in bare.chapters.values() if each.tasks]) == [
        "the table has no tasks, so there is nothing to prove"
    ]


def test_a_chapter_without_tasks_is_told_from_one_that_is_not_there() -> None:
    table = load_table()
    bare = Table({**table.chapters, 2: replace(table.chapters[2], tasks=())}, table.reference)
    with pytest.raises(CourseError, match="chapter 2 has no tasks; choose one of 1, 3"):
        bare.chapter_with_tasks(2)


def test_an_unknown_chapter_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99"]) == 2
    assert "chapter 99 is not in the course" in capsys.readouterr().err


def proved_with(chapter: Chapter) -> list[str]:
    table = load_table()
    return prove(Sources(repository(), replace(table, chapters={**table.chapters, chapter.number: chapter})), [chapter])


def test_a_table_that_is_wrong_is_found_out() -> None:
    """The table of chapter 1 with a test that needs no task, and with one that is not there."""
    one = load_table().chapters[1]
    needless = "tests/test_registry.py::test_a_name_in_the_table_is_found"
    missing = "tests/test_table.py::test_admission_sets_every_length[of-nothing]"
    problems = proved_with(replace(one, tasks=(replace(one.tasks[1], number=1, tests=(needless, missing)),)))
    assert problems == [
        f"chapter 1: in the starter, {needless} of task 1 passes",
        f"chapter 1: {missing} of chapter 1, task 1 did not run",
    ]


def test_tasks_in_the_wrong_order_are_found_out() -> None:
    """The first of these needs the second."""
    one = load_table().chapters[1]
    admit, leave = one.tasks[1], one.tasks[2]
    problems = proved_with(replace(one, tasks=(replace(leave, number=1), replace(admit, number=2))))
    test = "tests/test_table.py::test_a_slot_in_use_is_not_released"
    assert any(f"in the starter, {test} of task 1 fails" in problem for problem in problems)


def test_a_stub_that_an_import_needs_is_found_out() -> None:
    """`only_default` is called while the server's modules are imported."""
    one = load_table().chapters[1]
    stub = Stub("minisgl.server.requests", "only_default")
    problems = proved_with(replace(one, tasks=(replace(one.tasks[0], stubs=(*one.tasks[0].stubs, stub)),)))
    assert any(problem.startswith("chapter 1: the starter cannot be imported: it fails with") for problem in problems)
