"""Every assignment: its solution earns all points, and its starter fails for the reason that the handout names."""

from __future__ import annotations

import pytest

from minisgl.course import assignments
from minisgl.course.grading import grade

NAMES = assignments.names()


def test_there_are_assignments() -> None:
    assert {"lfu_eviction", "fair_queueing", "top_n_sigma", "gemma", "bug_hunt", "cpu_offload"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_solution_earns_all_points(name: str) -> None:
    assignment = assignments.load(name)
    report = grade(assignment, assignment.solution)
    assert (report.verdict, report.points) == ("passed", 100), report
    assert all(item.passed > 0 for item in report.items)


@pytest.mark.parametrize("name", NAMES)
def test_the_starter_fails_for_its_reason(name: str) -> None:
    assignment = assignments.load(name)
    submission = assignment.solution.rpartition(":")[2]
    report = grade(assignment, f"assignments.{name}.starter:{submission}")
    assert (report.verdict, report.points) == ("failed", 0), report
    first = report.items[0].first_failure
    assert first is not None
    assert assignment.starter_fails in f"{first.test}: {first.message}"
    assert all(item.failed for item in report.items), "nothing is given away"


@pytest.mark.parametrize("name", NAMES)
def test_the_handout_says_what_is_graded(name: str) -> None:
    assignment = assignments.load(name)
    handout = (assignment.folder / "README.md").read_text(encoding="utf-8")
    for heading in ("## Goals", "## Rubric", "## Time and machine", "## How it is graded", "## For teachers"):
        assert heading in handout
    for item in assignment.items:
        assert f"| {item.name} | {item.points} |" in handout
    assert assignment.starter_fails in handout
