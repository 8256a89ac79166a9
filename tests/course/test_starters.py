"""Starters: what is taken away, what stays exactly as it was, and the tests that come along."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

import pytest

from minisgl.book.course_table import CourseError, load_table
from minisgl.book.starters import (
    Sources,
    files_with_tests,
    function_text,
    is_untouched,
    outline,
    repository,
    with_functions,
    with_stubs,
)


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
    assert "tests/kvcache/test_radix.py" in files_with_tests(six.tasks)
    files = sources.suite(six.tasks)
    assert {"tests/kvcache/test_radix.py", "tests/kvcache/__init__.py"} <= set(files)
    assert {"conftest.py", "pyproject.toml", "tests/skip_budget.py", "tests/contracts/conftest.py"} <= set(files)
    assert "tests/kvcache/test_block_hash.py" not in files
    assert "tests/scheduler/harness.py" in sources.suite(sources.table.chapter(9).tasks), "a helper"
    assert "tests/fake_executor.py" in sources.suite(sources.table.chapter(9).tasks), "a helper's helper"


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


# -- putting functions in their place ----------------------------------------------------------------------------------


def test_every_solution_is_cut_out_and_put_back_to_the_letter(sources: Sources) -> None:
    for task in (task for chapter in sources.table.chapters.values() for task in chapter.tasks):
        for stub, text in sources.solution(task).items():
            source = sources.read(stub.path)
            assert with_functions(source, {stub.name: text}) == source
            stubbed = with_stubs(source, {stub.name: "not yet"})
            assert is_untouched(function_text(stubbed, stub.name)), "and not written where its body is away"
            assert not is_untouched(text)


def test_another_function_keeps_decorators_and_class_and_the_lines_of_its_strings() -> None:
    mine = '@mine\ndef grow(self, by=1):\n    """Mine."""\n\n    return by + len("""a\nb""")\n'
    written = with_functions(SOURCE, {"Tree.grow": mine})
    assert (
        '    @functools.cache\n    def grow(self, by=1):\n        """Mine."""\n\n        return by + len("""a\nb""")\n'
        in written
    )
    assert "@mine" not in written
    scope: dict[str, type] = {}
    exec(written, scope)
    assert scope["Tree"]().grow() == 4


@pytest.mark.parametrize(
    ("body", "untouched"),
    [
        ("raise NotImplementedError", True),
        ('raise NotImplementedError("soon")', True),
        ('"""What it does."""\n    raise NotImplementedError', True),
        ("...", True),
        ("pass", True),
        ('"""What it does."""', True),
        ("return None", False),
        ("raise ValueError", False),
        ("print(1)\n    raise NotImplementedError", False),
    ],
)
def test_what_is_untouched(body: str, untouched: bool) -> None:
    assert is_untouched(f"@cached\ndef f(self, x=1):\n    {body}\n") is untouched


def test_an_outline_is_signature_and_first_paragraph() -> None:
    assert outline(SOURCE, "Tree.grow") == (
        'def grow(\n    self,\n    by: int = 1,  # how much\n) -> int:\n    """Make it larger."""'
    )
    assert outline(SOURCE, "Tree.size") == "def size(self) -> int:"


# -- notebooks ---------------------------------------------------------------------------------------------------------


def test_a_starters_notebook_shows_nothing_that_is_to_be_written(sources: Sources) -> None:
    text = sources.starter(6)["notebooks/06-the-radix-tree.ipynb"]
    cells = json.loads(text)["cells"]
    assert len(cells) == len(json.loads(sources.read("notebooks/06-the-radix-tree.ipynb"))["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


# -- the solution ------------------------------------------------------------------------------------------------------


def test_a_readers_functions_are_compared_with_ours(sources: Sources, tmp_path: Path) -> None:
    task = sources.table.task("6.5")
    mine = tmp_path / "mine.py"
    mine.write_text("def _split(self, node, count):\n    return node\n")
    assert "-    return node" in list(sources.difference(task, mine))
    mine.write_text("class RadixCache:\n" + textwrap.indent(next(iter(sources.solution(task).values())), "    "))
    assert list(sources.difference(task, mine)) == []
    assert list(sources.difference(task, sources.root)) == []
    mine.write_text("def other(): ...")
    with pytest.raises(
        CourseError, match=r"mine.py has no function RadixCache._split, which is what task 6.5 is about"
    ):
        list(sources.difference(task, mine))
