"""Run the tests of tasks on a reader's package, or on ours with a reader's functions in it, and tell the results."""

from __future__ import annotations

import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minisgl.book.course_table import Chapter, CourseError, Task
from minisgl.book.starters import PACKAGE, Files, Function, Sources, files_with_tests, find_package, functions_of, write
from minisgl.book.supervise import Launch, Log, recorded, run_bounded

SECONDS_PER_TEST = 20
SECONDS_PER_RUN = 900
OUTPUT_LIMIT = 1 << 24

_OPTIONS = ["-p", "pytest_timeout", "--timeout=0", "-p", "no:cacheprovider", "-q", "--tb=no", "--no-header"]
_OPTIONS += ["--continue-on-collection-errors"]
_LINES = 12  # of a failure's message that are shown
_STUB = re.compile(r"NotImplementedError\W+(Chapter \d+, task \d+: [\w.]+)")


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    test: str  # ``file::test[parameters]``, or a file that could not be imported
    failure: str | None = None  # the exception; None if the test passed
    frames: tuple[tuple[str, int, str], ...] = ()  # file, line and text of the calls that led to it, innermost last
    printed: str = ""  # by the test, if it failed

    @property
    def stub(self) -> str | None:
        """The message of the stub that the test ran into, if it did."""
        found = _STUB.search(self.failure or "")
        return found[1] if found else None


Report = Callable[[list[Result], list[str], bool], None]
"""Hears of the results so far, of the names of all tests that will run, and whether it hears of them the last time."""


# -- what a reader sees ------------------------------------------------------------------------------------------------


def check(sources: Sources, number: int, directory: Path, timeout: int) -> bool:
    """Print what is done in a reader's folder and what is next; True if everything is done.

    Args:
        sources: the checkout whose tests are run; the folder's own copies may have been changed.
        directory: the reader's; it is not written to.
        timeout: seconds that one test may take; the first that takes longer ends the check.

    Raises `CourseError` if there is nothing to check, or the tests end without a result.
    """
    chapter = sources.table.chapter_with_tasks(number)
    find_package(directory, chapter)
    print(f"Chapter {number}, {chapter.title}: {directory}", flush=True)
    with workplace(sources, chapter.tasks) as folder:
        (folder / PACKAGE).symlink_to((directory / PACKAGE).resolve())
        for file in sorted(directory.rglob("conftest.py")):
            ours = sources.root / file.relative_to(directory)
            if not ours.exists() or ours.read_bytes() != file.read_bytes():
                print(f"  {file} counts for nothing here: the tests of the check bring their own along")
        lines = _Lines(
            lambda test: [f"{task.number}" for task in chapter.tasks if _is_of(task, test)],
            lambda key, results, _: _verdict(chapter, chapter.tasks[int(key) - 1], results),
        )
        results = run_tests(folder, [test for task in chapter.tasks for test in task.tests], timeout, report=lines)
        for task in chapter.tasks:
            lines.finish(f"{task.number}")
        for task in chapter.tasks:
            if failed := _failed(results_of(task, results)):
                print("\n" + _advice(chapter, task, failed[0], directory, folder))
                return False
        results = run_tests(folder, files_with_tests(chapter.tasks), timeout)
        failed = _failed(results)
        print(f"  all tests of the chapter: {len(results) - len(failed)} of {len(results)} pass")
        print(f"\n{_to_repeat(failed[0], chapter.tasks, directory, folder)}" if failed else "All tasks are done.")
    return not failed


def check_functions(sources: Sources, task: Task, modules: Files) -> bool:
    """Run a task's tests on our package with some modules changed, and print a line for each; True if all pass."""
    print(f"{task.id} {task.title}", flush=True)
    with workplace(sources, [task]) as folder:
        link_package(sources.root, folder, modules)
        shown: list[Result] = []

        def line(key: str, results: Sequence[Result], expected: int) -> str:
            failed = _failed(results)
            cases = f" ({len(failed)} of {expected} cases)" if failed and expected > 1 else ""
            text = f"  {'✗' if failed else '✓'} {in_words(key)}{cases}"
            if failed and not shown:
                shown.append(failed[0])
                text += f"\n{_indented(explain(failed[0], [task], folder), 6)}"
            return text

        results = run_tests(folder, task.tests, SECONDS_PER_TEST, report=_Lines(lambda test: [_function(test)], line))
    tests = {_function(result.test) for result in results}
    broken = {_function(result.test) for result in _failed(results)}
    if broken:
        print(f"{len(tests - broken)} of {len(tests)} tests pass. A hint: python -m minisgl course hint {task.id}")
    else:
        print(f"All {len(tests)} tests pass." if len(tests) > 1 else "The test passes.")
    return bool(results) and not broken


class _Lines:
    """Prints a line for a group of tests, a task or the cases of a test, as soon as all of them have ended.

    Args:
        groups: names of the groups in which a test is.
        line: of a group, with the results in it and the number of its tests.
    """

    def __init__(self, groups: Callable[[str], list[str]], line: Callable[[str, list[Result], int], str]) -> None:
        self._groups = groups
        self._line = line
        self._told: set[str] = set()

    def __call__(self, results: list[Result], found: list[str], is_last: bool) -> None:
        for group in dict.fromkeys(group for test in found for group in self._groups(test)):
            tests = [test for test in found if group in self._groups(test)]
            inside = [result for result in results if result.test in tests]
            if len(inside) == len(tests) or (is_last and inside):
                self.finish(group, inside, len(tests))

    def finish(self, group: str, results: Sequence[Result] = (), tests: int = 0) -> None:
        """Print the line of a group, unless it is printed."""
        if group not in self._told:
            self._told.add(group)
            print(self._line(group, list(results), tests), flush=True)


def _failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.failure is not None]


def _verdict(chapter: Chapter, task: Task, results: Sequence[Result]) -> str:
    failed = _failed(results)
    met = next((each for each in chapter.tasks if any(result.stub in each.messages for result in failed)), None)
    if not results:
        verdict = "not run"
    elif not failed:
        verdict = f"passed ({len(results)} {'test' if len(results) == 1 else 'tests'})"
    elif met is None:
        verdict = f"FAILED ({len(failed)} of {len(results)} tests)"
    else:
        verdict = "not written yet" if met == task else f"needs task {met.number}"
    return f"  task {task.number}  {task.title:<60} {verdict}"


def _advice(chapter: Chapter, task: Task, result: Result, directory: Path, folder: Path) -> str:
    """What a reader should do about the first failure."""
    for each in chapter.tasks:
        for stub in each.stubs:
            if result.stub == each.message(stub):
                lines = [node.lineno for name, node in _functions_in(directory / stub.path) if name == stub.name]
                return (
                    f"Next, task {each.number}, {each.title}: write {stub.name} in {directory / stub.path}"
                    f"{f', line {lines[0]}' if lines else ''}.\nThe first test that needs it is {result.test}."
                )
    functions = "".join(f"\n    {stub.name} in {directory / stub.path}" for stub in task.stubs)
    about = f"Task {task.number}, {task.title}, is about{functions}\n\n"
    return about + _to_repeat(result, chapter.tasks, directory, folder)


def _to_repeat(result: Result, tasks: Sequence[Task], directory: Path, folder: Path) -> str:
    alone = f"cd {shlex.quote(str(directory))} && python -m pytest {shlex.quote(result.test)}"
    report = _indented(explain(result, tasks, folder), 4)
    return f"The first failure is {result.test}:\n\n{report}\n\nTo see it alone:\n\n    {alone}"


def explain(result: Result, tasks: Sequence[Task], folder: Path) -> str:
    """The message of a failure, the line of the test where it happened, and the last line of the reader's own code."""
    message = (result.failure or "").removeprefix("AssertionError: ").strip().splitlines()
    lines = [*message[:_LINES], *(["…"] if len(message) > _LINES else [])]
    for file, number, text in [frame for frame in result.frames if frame[0].startswith("tests/")][-1:]:
        lines.append(f"in the test, {file}, line {number}: {text or _line(folder / file, number)}")
    own = [
        (stub, name, node) for task in tasks for stub in task.stubs for name, node in _functions_in(folder / stub.path)
    ]
    for file, number, text in reversed(result.frames):
        for stub, name, node in own:
            if (file, name) == (stub.path, stub.name) and node.lineno <= number <= (node.end_lineno or 0):
                where = f"in your {name}, line {number - node.lineno + 1} of it"
                printed = [] if not result.printed else ["printed until then:", _indented(result.printed.rstrip(), 2)]
                return "\n".join([*lines, f"{where}: {text or _line(folder / file, number)}", *printed])
    return "\n".join(lines if not result.printed else [*lines, "printed until then:", _indented(result.printed, 2)])


def in_words(test: str) -> str:
    """The name of a test as a sentence without its end."""
    name = test.rpartition("::")[2]
    return name.removeprefix("test_").replace("_", " ") if "::" in test else test


def _function(test: str) -> str:
    return test.partition("[")[0]


def _indented(text: str, columns: int) -> str:
    return "\n".join(" " * columns + line for line in text.splitlines())


def _line(file: Path, number: int) -> str:
    return file.read_text(encoding="utf-8").splitlines()[number - 1].strip() if file.is_file() else "…"


def _functions_in(file: Path) -> list[tuple[str, Function]]:
    try:
        return functions_of(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError):
        return []


# -- running tests -----------------------------------------------------------------------------------------------------


@contextmanager
def workplace(sources: Sources, tasks: Sequence[Task]) -> Iterator[Path]:
    """A temporary folder with the tests of some tasks, in which a package is to be put beside them."""
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as name:
        folder = Path(name).resolve() / "tests-of-the-course"
        write(sources.suite(tasks), folder)
        yield folder


def link_package(root: Path, folder: Path, changed: Files) -> None:
    """Put a package into a folder that is the one under ``root``, but for some files; the others are links."""
    opened = {parent for path in changed for parent in Path(path).parents}
    for part in sorted(opened - {Path(".")}):
        (folder / part).mkdir(exist_ok=True)
        for entry in (root / part).iterdir():
            place = part / entry.name
            if place.as_posix() in changed:
                (folder / place).write_text(changed[place.as_posix()], encoding="utf-8")
            elif place not in opened:
                (folder / place).symlink_to(entry)


def run_tests(
    folder: Path,
    tests: Sequence[str],
    timeout: int,
    launch: Launch = run_bounded,
    report: Report = lambda *_: None,
    options: Sequence[str] = (),
) -> list[Result]:
    """Run tests in a folder, on the package in it.

    Args:
        folder: a `workplace`.
        tests: which to run, as in a `Task`.
        timeout: seconds that one test may take; the first that takes longer is the last that runs.
        launch: runs pytest.
        report: hears of results while tests run.
        options: more of pytest's.

    Raises `CourseError` if the process ended without a result, or pytest is not installed.
    """
    for name in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(name) is None:
            raise CourseError(f"the checks need {name}: run `pip install -e .[dev]` in the repository")
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as scratch:
        events = Path(scratch) / "events.jsonl"
        size = 0

        def watch() -> None:
            nonlocal size
            if events.exists() and events.stat().st_size > size:
                size = events.stat().st_size
                report(*_results(Log(events), tests, folder), False)

        arguments = [*_OPTIONS, *options, *dict.fromkeys(_function(test) for test in tests)]
        command = recorded(events, "", timeout, arguments)
        ended = launch(command, _environment(folder, scratch), folder, SECONDS_PER_RUN, OUTPUT_LIMIT, watch)
        log = Log(events)
    results, found = _results(log, tests, folder)
    end = log.last("end")
    if ended.stopped == "time":
        raise CourseError(f"the tests were stopped after {SECONDS_PER_RUN} seconds: look for a loop without an end")
    if end is None and (running := _running(log)) is not None:
        how = f"took longer than {timeout} seconds, and was stopped: look for a loop without an end"
        frames = tuple((os.path.relpath(path, folder), line, text) for path, line, text in log.stack)
        failure = f"The test {how}" if log.stack else "The test ended its process"
        results.append(Result(running, failure, frames))
    elif end is None or not (results or found):
        tail = "\n".join(ended.output.splitlines()[-20:])
        raise CourseError(
            "the tests ended without a result: something ends the process or cannot be imported. Import the "
            f"package in a shell, or run `python -m pytest` in its folder. The last that the tests wrote:\n{tail}"
        )
    report(results, found, True)
    return results


def results_of(task: Task, results: Sequence[Result]) -> list[Result]:
    """Those of the task's tests."""
    return [result for result in results if _is_of(task, result.test)]


def fits(test: str, pattern: str) -> bool:
    """Whether what ran, ``file::test[parameters]`` or a file that could not be imported, is what a `Task` names."""
    name, _, parameters = test.partition("[")
    wanted, _, parameter = pattern.partition("[")
    if wanted.startswith(f"{name}::") and name.endswith(".py"):
        return True
    if not (name == wanted or name.startswith((f"{wanted}::", f"{wanted}/"))):
        return False
    return not parameter or f"-{parameter.rstrip(']')}-" in f"-{parameters.rstrip(']')}-"


def _is_of(task: Task, test: str) -> bool:
    return any(fits(test, pattern) for pattern in task.tests)


def _running(log: Log) -> str | None:
    """The test that has begun and not ended."""
    started = log.last("started")
    return None if started is None or started["id"] in log.passed else str(started["id"])


def _results(log: Log, tests: Sequence[str], folder: Path) -> tuple[list[Result], list[str]]:
    """Results so far, and the names of all tests that were found, of those that are wanted."""
    results: dict[str, Result] = {}
    for event in log.events:
        if event["event"] == "unreadable" or (event["event"] == "tested" and not event["passed"]):
            frames = tuple((file, line, text) for file, line, text in event["frames"])
            results.setdefault(event["id"], Result(event["id"], event["message"], frames, event.get("printed", "")))
    for test, passed in log.passed.items():
        if passed:
            results[test] = Result(test)
    found = [event["id"] for event in log.events if event["event"] in ("collected", "unreadable")]
    wanted = [test for test in found if any(fits(test, pattern) for pattern in tests)]
    return [result for result in results.values() if result.test in wanted], wanted


def _environment(folder: Path, scratch: str) -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": str(folder),
        "PYTHONDONTWRITEBYTECODE": "1",
        "HYPOTHESIS_STORAGE_DIRECTORY": scratch,
        # Plugins that happen to be installed take seconds to load, and change what is tested.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # A stub in a kernel raises what it says, not an error of the interpreter's own.
        "TRITON_FRONT_END_DEBUGGING": "1",
    }
