"""Taking bodies away: what stays is exactly the text that was there."""

from __future__ import annotations

import pytest

from minisgl.course.errors import CourseError
from minisgl.course.stubs import line_of, with_stubs, without_later_imports

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


INIT = '''"""A package."""

from package import kinds as kinds
from package.early import A
from package.late import (
    B,
    C,
)

__all__ = [
    "A",
    "B",
    "C",
]
'''


def is_early(imported: str) -> bool:
    return "late" not in imported


def test_an_init_exports_what_there_is() -> None:
    late = INIT[INIT.index("from package.late") : INIT.index("\n__all__")]
    assert without_later_imports(INIT, is_early, is_init=True) == INIT.replace(late, "").replace(
        '    "B",\n    "C",\n', ""
    )


def test_other_files_lose_only_imports_for_registration() -> None:
    source = "from package import late as late  # registers\nfrom package.late import B\nx = 1\n"
    assert without_later_imports(source, is_early, is_init=False) == "from package.late import B\nx = 1\n"
