"""What a reader sees of a test that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.book.checks import explain
from minisgl.book.supervise import Result

TEST = """import pytest


class TestPages:
    @pytest.mark.parametrize("count", [1, 2])
    def test_pages_are_counted(self, count: int) -> None:
        pages = helper(count)
        for _ in range(count):
            assert pages == [
                count,
            ]
        assert count == 7


def helper(count):
    assert count > 0
"""
FILE = "tests/test_pages.py"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tests").mkdir()
    (tmp_path / FILE).write_text(TEST, encoding="utf-8")
    return tmp_path


def shown(folder: Path, failure: str, *frames: tuple[str, int, str], test: str = f"{FILE}::test_pages") -> list[str]:
    return explain(Result(test, failure, frames, ""), [], folder).splitlines()


def test_the_test_is_shown_as_far_as_it_came(folder: Path) -> None:
    """Up to the end of the statement that failed, which an arrow marks."""
    message = "AssertionError: assert got       [3]\n  expected  [2]\n  missing   [2]"
    assert shown(folder, message, (FILE, 9, "assert pages == ["), test=f"{FILE}::TestPages::test_pages[2]") == [
        "got       [3]",
        "expected  [2]",
        "missing   [2]",
        f"in the test, {FILE}, line 9, case 2:",
        "      def test_pages_are_counted(self, count: int) -> None:",
        "          pages = helper(count)",
        "          for _ in range(count):",
        "→             assert pages == [",
        "                  count,",
        "              ]",
    ]


def test_a_helper_is_shown_with_the_line_that_called_it(folder: Path) -> None:
    lines = shown(folder, "assert 0 > 0", (FILE, 7, "pages = helper(count)"), (FILE, 16, "assert count > 0"))
    assert lines == [
        "not true: 0 > 0",
        f"in the test, {FILE}, line 16:",
        "  def helper(count):",
        "→     assert count > 0",
        f"called by {FILE}, line 7: pages = helper(count)",
    ]


def test_of_a_long_test_the_end_is_shown(folder: Path) -> None:
    body = "".join(f"    x{i} = {i}\n" for i in range(40))
    (folder / FILE).write_text(f"def test_long():\n{body}    assert x0\n", encoding="utf-8")
    lines = shown(folder, "assert 0", (FILE, 42, "assert x0"))[2:]
    assert lines[:3] == ["  def test_long():", "      …", "      x24 = 24"]
    assert lines[-1] == "→     assert x0"


def test_a_file_that_is_gone_leaves_the_line(folder: Path) -> None:
    assert shown(folder, "assert 0", ("tests/gone.py", 3, "assert x"))[1:] == [
        "in the test, tests/gone.py, line 3:",
        "  assert x",
    ]


@pytest.mark.parametrize(
    ("failure", "lines"),
    [
        ("AssertionError: one\nassert not True\n +  where True = evict()", ["one", " +  where True = evict()"]),
        ("the keys\nassert False\n +  where False = <built-in equal at 0x7f5907>(1)", ["the keys"]),
        ("assert np.False_", ["the marked line is not true"]),
        ("Failed: DID NOT RAISE InvariantError", ["InvariantError was to be raised, and was not"]),
        ("assert 'a' in ['b']\n\nUse -v to get more diff", ["not true: 'a' in ['b']"]),
        ("\n".join(map(str, range(30))), [*map(str, range(12)), "…"]),
    ],
)
def test_what_only_the_authors_of_tests_can_use_is_left_out(folder: Path, failure: str, lines: list[str]) -> None:
    assert shown(folder, failure) == lines
