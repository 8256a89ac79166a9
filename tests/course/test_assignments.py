"""Every assignment: its solution earns all points, and its starter fails for the reason that the handout names.

Starters are written by hand, since a solution's imports and helpers would give it away. What a starter asks for, its
solution has, under the same name and with the same signature.
"""

from __future__ import annotations

import inspect
import runpy
from pathlib import Path
from typing import Any

import pytest

from minisgl.book.grading import FOLDER, ROOT, grade, load, names

NAMES = names()


def test_there_are_assignments() -> None:
    assert {"lfu_eviction", "fair_queueing", "top_n_sigma", "gemma", "bug_hunt", "cpu_offload"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_earns_all_points(name: str) -> None:
    assignment = load(name)
    report = grade(assignment, assignment.solution)
    assert (report.verdict, report.points) == ("passed", 100), report
    assert all(item.passed > 0 for item in report.items)


@pytest.mark.parametrize("name", NAMES)
def test_the_starter_fails_for_its_reason(name: str) -> None:
    assignment = load(name)
    submission = assignment.solution.rpartition(":")[2]
    report = grade(assignment, f"assignments.{name}.starter:{submission}")
    assert (report.verdict, report.points) == ("failed", 0), report
    first = report.items[0].first_failure
    assert first is not None
    assert assignment.starter_fails in f"{first.test}: {first.message}"
    assert all(item.failed for item in report.items), "nothing is given away"


@pytest.mark.parametrize("name", NAMES)
def test_the_handout_says_what_is_graded(name: str) -> None:
    assignment = load(name)
    handout = (assignment.folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Goals", "## Rubric", "## Time and machine", "## How it is graded", "## For teachers"):
        assert heading in handout
    for item in assignment.items:
        assert f"| {item.name} | {item.points} |" in handout
    assert assignment.starter_fails in handout


# -- what a starter promises ---------------------------------------------------------------------------------------


def public(path: Path) -> dict[str, Any]:
    """Classes and functions that a module defines under public names."""
    namespace = runpy.run_path(str(path), run_name="read")
    return {
        name: item
        for name, item in namespace.items()
        if not name.startswith("_") and getattr(item, "__module__", None) == "read"
    }


def described(item: Any) -> str:
    """How something is called, with the words of its annotations; of what is not called, what it is."""
    called = getattr(item, "__func__", item)  # of a static or a class method
    kind = type(item).__name__
    return f"{kind} {inspect.signature(called)}" if inspect.isfunction(called) else kind


def promises(starter: dict[str, Any]) -> dict[str, str]:
    """Each function and class, and each member that a class defines itself: qualified name → description."""
    found = {name: described(item) for name, item in starter.items()}
    for name, item in starter.items():
        if isinstance(item, type):
            own = {member: each for member, each in vars(item).items() if member == "__init__" or member[0] != "_"}
            found |= {f"{name}.{member}": described(each) for member, each in own.items()}
    return found


def broken_promises(starter: Path, solution: Path) -> list[str]:
    """What a starter asks for and its solution has not, or has differently, inherited or not; in sentences."""
    there = public(solution)
    wanted = promises(public(starter))
    problems = [] if any("(" in each for each in wanted.values()) else [f"{starter} asks for no function"]
    for name, expected in wanted.items():
        owner, _, member = name.partition(".")
        item = there.get(owner)
        if item is not None and member:
            item = inspect.getattr_static(item, member, None)
        if item is None:
            problems.append(f"{solution} has no {name}")
        elif described(item) != expected:
            problems.append(f"{name} is {described(item)} in {solution}, and in the starter {expected}")
    return problems


PAIRS = {
    name: (each.folder / "starter.py", ROOT / f"{each.solution.partition(':')[0].replace('.', '/')}.py")
    for name, each in ((name, load(name)) for name in names())
}


def test_there_are_pairs() -> None:
    starters = {path.parent.name for path in FOLDER.glob("*/starter.py")}
    assert starters == PAIRS.keys()
    assert len({solution for _, solution in PAIRS.values()}) == len(PAIRS) >= 6


@pytest.mark.parametrize("name", PAIRS)
def test_a_starter_asks_for_what_its_solution_has(name: str) -> None:
    assert broken_promises(*PAIRS[name]) == []


STARTER = """
from __future__ import annotations


class Order:
    limit = 4

    def arrange(self, waiting: list[int], limit: int = 1) -> list[int]:
        raise NotImplementedError

    @staticmethod
    def fits(size: int) -> bool:
        raise NotImplementedError
"""


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("class Order", "class Policy", "has no Order"),
        ("def arrange", "def order", "has no Order.arrange"),
        ("    limit = 4", "", "has no Order.limit"),
        ("list[int], limit", "tuple[int], limit", "waiting: 'tuple[int]'"),
        ("limit: int = 1", "limit: int = 2", "limit: 'int' = 2"),
        ("-> bool", "-> int", "Order.fits is staticmethod (size: 'int') -> 'int'"),
        ("    @staticmethod\n", "", "Order.fits is function"),
    ],
)
def test_a_difference_is_named(tmp_path: Path, old: str, new: str, problem: str) -> None:
    starter, solution = tmp_path / "starter.py", tmp_path / "solution.py"
    starter.write_text(STARTER)
    solution.write_text(STARTER)
    assert broken_promises(starter, solution) == []
    assert old in STARTER
    solution.write_text(STARTER.replace(old, new))
    assert any(problem in each for each in broken_promises(starter, solution))


def test_what_is_inherited_is_there_and_what_is_private_is_free(tmp_path: Path) -> None:
    starter, solution = tmp_path / "starter.py", tmp_path / "solution.py"
    starter.write_text(STARTER + "\n    def _helper(self) -> None: ...\n")
    solution.write_text(STARTER.replace("Order", "_Base") + "\n\nclass Order(_Base):\n    more = 1\n")
    assert broken_promises(starter, solution) == []


def test_a_starter_without_a_function_is_no_starter(tmp_path: Path) -> None:
    starter = tmp_path / "starter.py"
    starter.write_text("class Order:\n    limit = 4\n")
    assert broken_promises(starter, starter) == [f"{starter} asks for no function"]
