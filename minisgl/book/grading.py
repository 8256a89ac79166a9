"""``grade``: run the tests of an assignment over a submission, and report points for people and for programs."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from minisgl.book.course_table import CourseError, parsed, read_toml
from minisgl.book.supervise import Ended, Log, fits, run_pytest

ROOT = Path(__file__).resolve().parents[2]  # the checkout; suites and assignments are not installed with the package

FOLDER = ROOT / "assignments"

OUTPUT_LIMIT = 1 << 20  # bytes that a submission may print

_USAGE_ERROR = 4  # what pytest ends with if ``--impl`` names a class that fits no suite


@dataclass(frozen=True)
class Item:
    """A line of the rubric. Its points are given if every one of its tests passes."""

    name: str
    points: int  # that it is worth
    tests: tuple[str, ...]  # ``file``, ``file::test`` or ``file::Class``, beside ``assignment.toml`` or in the checkout
    performance: bool = False  # the tests count operations: a submission that fails only them is slow, and not wrong


@dataclass(frozen=True)
class Assignment:
    """An assignment as ``assignment.toml`` in its folder describes it."""

    name: str
    folder: Path  # where handout, starter and tests are
    title: str
    starter_fails: str  # what the first failure of the starter says
    solution: str  # ``module:Class`` that earns all points
    time_limit: float  # seconds that a submission is given, unless the command says otherwise
    items: tuple[Item, ...]

    @property
    def points(self) -> int:
        """Of all items."""
        return sum(item.points for item in self.items)

    def tests(self, item: Item) -> list[str]:
        """The tests of an item, with absolute paths. Raises `CourseError` if a file is not there."""
        found = []
        for test in item.tests:
            file, separator, name = test.partition("::")
            base = next((base for base in (self.folder, ROOT) if (base / file).is_file()), None)
            if base is None:
                raise CourseError(f"{self.name}: {file} is neither in {self.folder} nor in {ROOT}")
            found.append(f"{base / file}{separator}{name}")
        return found


def names() -> list[str]:
    """The assignments of this checkout."""
    return sorted(path.parent.name for path in FOLDER.glob("*/assignment.toml"))


def load(name: str) -> Assignment:
    """The assignment called ``name``, or the one in the folder ``name``, such as a teacher's own copy.

    Raises `CourseError` if there is none, or its table is not valid.
    """
    folder = FOLDER / name if name in names() else Path(name).resolve()
    file = folder / "assignment.toml"
    if not file.is_file():
        known = ", ".join(names()) or "none, since they are in the repository, and not in an installed package"
        raise CourseError(f"no assignment {name!r}; choose from {known}; or give a folder that has one")
    table = read_toml(file)
    table["items"] = [parsed(Item, entry, f"{file}, items") for entry in table.get("items", [])]
    return parsed(Assignment, table, str(file), name=folder.name, folder=folder)


@dataclass(frozen=True, slots=True)
class Failure:
    """A test that did not pass: its name, and the beginning of its message."""

    test: str
    message: str


@dataclass(frozen=True, slots=True)
class ItemResult:
    """What became of a line of the rubric: all its points or none, and numbers of tests."""

    name: str
    points: int
    max_points: int
    passed: int
    failed: int
    not_run: int
    first_failure: Failure | None


@dataclass(frozen=True, slots=True)
class Report:
    """What is written as JSON.

    ``verdict`` is ``passed`` for all points, ``slow`` if only performance tests failed, ``failed`` otherwise. Or it
    says why grading came to no end: ``no-import``, ``not-gradable`` (methods are missing), ``exited``,
    ``time-limit``, ``output-limit``, ``processes`` (it forked, or left something running).
    """

    assignment: str
    submission: str
    verdict: str
    message: str  # the reason of the verdict, in a sentence
    points: int
    max_points: int
    items: list[ItemResult]
    seconds: float  # that grading took
    time_limit: float
    output: str  # the first 4,000 bytes that were printed
    output_bytes: int  # that were printed in all


def grade(assignment: Assignment, submission: str, time_limit: float | None = None, cwd: Path | None = None) -> Report:
    """Grade ``module:Class``, whose module is looked for in ``cwd`` first, in a process of its own on the CPU.

    The time limit is in seconds; None is the assignment's own. Raises `CourseError` if it isn't positive, if tests of
    the assignment do not exist, or this system has no process groups.
    """
    if os.name != "posix":
        raise CourseError("grade needs the process groups of Linux or macOS; on Windows, run it inside WSL")
    limit = assignment.time_limit if time_limit is None else time_limit
    if not 0 < limit < float("inf"):
        raise CourseError(f"the time limit is a number of seconds above 0, not {limit}")
    tests = [test for item in assignment.items for test in assignment.tests(item)]
    options = ["-c", f"{ROOT}/pyproject.toml", f"--rootdir={ROOT}", f"--impl={submission}"]
    # Without capture, because pytest would keep all that is printed.
    options += ["-s", "-o", "addopts=--strict-markers", *dict.fromkeys(tests)]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {"CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0", "PYTHONPATH": os.pathsep.join(paths)}
    ended, log = run_pytest(options, env, cwd or Path.cwd(), limit, OUTPUT_LIMIT, submission)
    items = [_result(log, item, assignment.tests(item)) for item in assignment.items]
    points, seconds = sum(item.points for item in items), round(ended.seconds, 1)
    outcome = *_verdict(assignment, items, log, ended, limit), points, assignment.points, items
    return Report(assignment.name, submission, *outcome, seconds, limit, ended.output, ended.output_bytes)


def _result(log: Log, item: Item, tests: Sequence[str]) -> ItemResult:
    """``tests`` have absolute paths, so they are compared with the files of what was collected, and not with names."""
    names = {event["id"]: f"{event['file']}::{event['name']}" for event in log.all("collected")}
    ids = [each for each, name in names.items() if any(fits(name, test) for test in tests)]
    ended = [log.results[each] for each in ids if each in log.results]
    failures = [Failure(result.test, result.failure) for result in ended if result.failure is not None]
    passed, failed, not_run = len(ended) - len(failures), len(failures), len(ids) - len(ended)
    points = item.points if ids and passed == len(ids) else 0
    return ItemResult(item.name, points, item.points, passed, failed, not_run, failures[0] if failures else None)


def _verdict(
    assignment: Assignment, items: Sequence[ItemResult], log: Log, ended: Ended, limit: float
) -> tuple[str, str]:
    """The verdict and its reason, the most serious first."""
    running = log.last("started")
    where = f"in {running['id']}" if running else "while it was imported"
    if ended.stopped == "output":
        return "output-limit", f"it printed more than {OUTPUT_LIMIT} bytes {where}, and was stopped"
    if ended.stopped == "time":
        return "time-limit", f"it was stopped after {limit:g} s {where}"
    if exits := log.all("exit"):
        return "exited", f"it ended the interpreter in {exits[0]['id']}"
    if (broken := log.last("no-import")) is not None:
        return "no-import", broken["message"]
    if (end := log.last("end")) is None:
        return "exited", f"its process ended with code {ended.exit_code} {where}"
    if log.last("forked") is not None or ended.left_behind:
        return "processes", f"it started processes of its own, and {ended.left_behind} of them were still there"
    if (unreadable := log.last("unreadable")) is not None:
        return "not-gradable", f"a file of tests cannot be read: {unreadable['message']}"
    if end["code"] == _USAGE_ERROR:
        return "not-gradable", ended.output.strip()
    missed = [item for item, result in zip(assignment.items, items, strict=True) if result.points < item.points]
    if not missed:
        return "passed", "all tests pass"
    first = next((each.first_failure for each in items if each.first_failure is not None), None)
    message = "some tests did not run" if first is None else first.message.partition("\n")[0]
    return ("slow" if all(item.performance for item in missed) else "failed"), message


def add_grade(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``grade``; its arguments carry ``run``, which takes them and returns the exit status."""
    command = subparsers.add_parser(
        "grade",
        help="grade a submission to an assignment",
        description="Exit status: 0 for full points, 1 for less, 2 if nothing could be graded.",
    )
    known = ", ".join(names())
    command.add_argument("assignment", help=f"one of {known}; or a folder with assignment.toml")
    command.add_argument("submission", metavar="module:Class", help="looked for in the current folder first")
    command.add_argument("--json", metavar="FILE", type=Path, help="write the report there as well")
    command.add_argument("--time-limit", metavar="S", type=float, help="seconds; the assignment has a default")
    command.set_defaults(run=run_grade)


def run_grade(arguments: argparse.Namespace) -> int:
    """Grade, print, and write the report."""
    report = grade(load(arguments.assignment), arguments.submission, arguments.time_limit)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    for item in report.items:
        counts = f"{item.passed} passed, {item.failed} failed, {item.not_run} not run"
        print(f"{item.points:4} of {item.max_points:3}  {item.name}: {counts}")
        if item.first_failure is not None:
            print(f"             {item.first_failure.test}: {item.first_failure.message.partition(chr(10))[0]}")
    print(f"{report.points:4} of {report.max_points:3}  {report.verdict} in {report.seconds} s: {report.message}")
    return 0 if report.verdict == "passed" else 1
