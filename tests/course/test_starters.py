"""Starters: what is taken away, what stays exactly as it was, and the tests that come along."""

from __future__ import annotations

import pytest

from minisgl.book.course_table import CourseError, load_table
from minisgl.book.starters import Sources, files_with_tests, line_of, repository, with_stubs


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(repository(), load_table())


def test_a_starter_differs_from_the_package_in_its_tasks_alone(sources: Sources) -> None:
    done = sources.package()
    for chapter in (each for each in sources.table.chapters.values() if each.tasks):
        begun = sources.starter(chapter.number)
        assert done.keys() <= begun.keys()
        differing = {path for path in done if begun[path] != done[path]}
        assert differing == {stub.path for task in chapter.tasks for stub in task.stubs}
        for task in chapter.tasks:
            for stub in task.stubs:
                assert f'NotImplementedError("{task.message(stub)}")' in begun[stub.path]
        assert all(path.startswith("minisgl/") for path in done)


def test_the_package_is_the_source_itself_with_the_files_that_it_reads(sources: Sources) -> None:
    files = sources.package()
    for path in ("minisgl/kvcache/radix.py", "minisgl/server/ui/index.html", "minisgl/book/course/06.toml"):
        assert files[path] == sources.read(path)
    assert not [path for path in files if "__pycache__" in path]


def test_tests_come_with_what_they_need(sources: Sources) -> None:
    six = sources.table.chapter(6)
    assert "tests/kvcache/test_radix.py" in files_with_tests(six)
    files = sources.suite(six)
    assert {"tests/kvcache/test_radix.py", "tests/kvcache/__init__.py"} <= set(files)
    assert {"conftest.py", "pyproject.toml", "tests/skip_budget.py", "tests/contracts/conftest.py"} <= set(files)
    assert "tests/kvcache/test_block_hash.py" not in files
    assert "tests/scheduler/harness.py" in sources.suite(sources.table.chapter(9)), "a helper"
    assert "tests/fake_executor.py" in sources.suite(sources.table.chapter(9)), "a helper's helper"


# -- taking bodies away ------------------------------------------------------------------------------------------------

SOURCE = '''
"""A module."""

import functools  # kept


class Tree:
    """A tree."""

    @functools.cache
    def grow(
        self,
        by: int = 1,  # how much
    ) -> int:
        """Make it larger.

        Returns:
            its size.
        """
        # how it is done
        return by  # one

    # between two functions
    @property
    def size(self) -> int:
        # a comment above the body

        return 3

    async def wait(self) -> None:
        "in one line"
        def inner() -> int:
            return 1

        inner()


def free(x: int) -> int:
    @functools.cache
    def inner() -> int:
        return x

    return inner()
'''


def test_the_body_goes_and_everything_else_stays() -> None:
    stubbed = with_stubs(SOURCE, {"Tree.grow": "Chapter 1, task 1: Tree.grow"})
    body = "        # how it is done\n        return by  # one\n"
    assert body in SOURCE
    assert stubbed == SOURCE.replace(body, '        raise NotImplementedError("Chapter 1, task 1: Tree.grow")\n')


def test_several_at_once_with_and_without_docstrings() -> None:
    names = ["Tree.grow", "Tree.size", "Tree.wait", "free"]
    stubbed = with_stubs(SOURCE, {name: f"say {name}" for name in names})
    assert [line.strip() for line in stubbed.splitlines() if "raise" in line] == [
        f'raise NotImplementedError("say {name}")' for name in names
    ]
    for gone in ("# how it is done", "a comment above the body", "def inner", "return"):
        assert gone not in stubbed.replace("Returns", "")
    for kept in ("# kept", "# how much", "its size.", "# between two functions", "@property", '"in one line"'):
        assert kept in stubbed


def test_a_stub_raises_what_it_was_given() -> None:
    scope: dict[str, type] = {}
    exec(with_stubs(SOURCE, {"Tree.grow": "Chapter 1, task 1: Tree.grow"}), scope)
    with pytest.raises(NotImplementedError, match=r"^Chapter 1, task 1: Tree\.grow$"):
        scope["Tree"]().grow()
    assert scope["Tree"]().size == 3


@pytest.mark.parametrize(
    ("source", "name"),
    [(SOURCE, "Tree.shrink"), ("def f(): ...\ndef f(): ...\n", "f"), ("def f(): return 1\n", "f")],
)
def test_what_is_no_task(source: str, name: str) -> None:
    with pytest.raises(CourseError):
        with_stubs(source, {name: "a task"})


def test_where_a_function_is() -> None:
    line = line_of(SOURCE, "Tree.size")
    assert line is not None
    assert SOURCE.splitlines()[line - 1].strip() == "def size(self) -> int:"
    assert line_of(SOURCE, "Tree.shrink") is None
