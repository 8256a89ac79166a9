"""Run the tests of tasks on a reader's package, or on ours with a reader's functions in it, and tell the results."""

from __future__ import annotations

import ast
import linecache
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from textwrap import indent

from minisgl.book.course_table import Chapter, CourseError, Task
from minisgl.book.starters import PACKAGE, Files, Function, Sources, files_with_tests, find_package, functions_of, write
from minisgl.book.supervise import Launch, Log, Result, fits, run_bounded, run_pytest

SECONDS_PER_TEST = 20
SECONDS_PER_RUN = 900
OUTPUT_LIMIT = 1 << 24

_NO_END = "look for a loop, or an await, that never ends"
_LINES = 12  # of a failure's message that are shown
_LISTED = 18  # lines of its test
_NOISE = re.compile(
    r"^assert (not )?(np\.)?(True|False)_?$| 0x[0-9a-f]{6,}|^ +\+ .{120}|Use -v+ to|Full output truncated"
)
_STUBS_IN_KERNELS = {"TRITON_FRONT_END_DEBUGGING": "1"}  # raise what they say, not an error of the interpreter's own


def check(sources: Sources, number: int, directory: Path, timeout: int) -> bool:
    """Print what is done in a reader's folder and what is next; True if everything is done.

    The tests are those of ``sources``, since the folder's own may have been changed; nothing is written to it. The
    first test that takes longer than ``timeout`` seconds ends the check. Raises `CourseError` if there is nothing to
    check, or the tests end without a result.
    """
    chapter = sources.table.chapter_with_tasks(number)
    find_package(directory, chapter)
    print(f"Chapter {number}, {chapter.title}: {directory}", flush=True)
    tasks = f"{len(chapter.tasks)} tasks" if len(chapter.tasks) > 1 else "its task"
    print(f"  testing {tasks}, one after the other; a test may take up to {timeout} seconds", flush=True)
    told, first_failed = 0, 0

    def tell(results: Sequence[Result], is_last: bool) -> None:
        """Print a line for each task that is over: a test of a later one has ended, too."""
        nonlocal told, first_failed
        reached = max((task.number for task in chapter.tasks if results_of(task, results)), default=1)
        for task in chapter.tasks[told : None if is_last else reached - 1]:
            told, own = task.number, results_of(task, results)
            print(_verdict(chapter, task, own, first_failed), flush=True)
            first_failed = first_failed or (task.number if _failed(own) else 0)

    with workplace(sources, chapter.tasks) as folder:
        (folder / PACKAGE).symlink_to((directory / PACKAGE).resolve())
        for file in sorted(directory.rglob("conftest.py")):
            ours = sources.root / file.relative_to(directory)
            if not ours.exists() or ours.read_bytes() != file.read_bytes():
                print(f"  {file} counts for nothing here: the tests of the check bring their own along")
        results = run_tests(folder, [test for task in chapter.tasks for test in task.tests], timeout, report=tell)
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
    told: dict[str, bool] = {}  # test → whether it passed
    with workplace(sources, [task]) as folder:
        link_package(sources.root, folder, modules)

        def tell(results: Sequence[Result], is_last: bool) -> None:
            """Print a line for each test whose cases are over: one of the next has ended, too."""
            tests = [(test, list(cases)) for test, cases in groupby(results, lambda result: _function(result.test))]
            for test, cases in tests[len(told) : None if is_last else -1]:
                failed = _failed(cases)
                count = f" ({len(failed)} of {len(cases)} cases)" if failed and len(cases) > 1 else ""
                print(f"  {'✗' if failed else '✓'} {in_words(test)}{count}", flush=True)
                if failed and all(told.values()):
                    print(indent(explain(failed[0], [task], folder), " " * 6), flush=True)
                told[test] = not failed

        run_tests(folder, task.tests, SECONDS_PER_TEST, report=tell)
    passed = sum(told.values())
    if passed < len(told):
        print(f"{passed} of {len(told)} tests pass. A hint: python -m minisgl course hint {task.id}")
    else:
        print(f"All {passed} tests pass." if passed > 1 else "The test passes.")
    return passed == len(told) > 0


def _failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.failure is not None]


def _verdict(chapter: Chapter, task: Task, results: Sequence[Result], first_failed: int) -> str:
    failed = _failed(results)
    met = next((each for each in chapter.tasks if any(result.stub in each.messages for result in failed)), None)
    if not results:
        verdict = "not run"
    elif not failed:
        verdict = f"passed ({len(results)} {'test' if len(results) == 1 else 'tests'})"
    elif met is None:
        cause = f"; task {first_failed} first" if first_failed else ""
        verdict = f"FAILED ({len(failed)} of {len(results)} tests{cause})"
    else:
        verdict = "not written yet" if met == task else f"needs task {met.number}"
    return f"  task {task.number}  {task.title:<60} {verdict}"


def _advice(chapter: Chapter, task: Task, result: Result, directory: Path, folder: Path) -> str:
    """What a reader should do about the first failure."""
    for each in chapter.tasks:
        for stub in each.stubs:
            if result.stub == each.message(stub):
                place, found = directory / stub.path, _functions_in(directory / stub.path)
                line = f", line {found[stub.name].lineno}" if stub.name in found else ""
                return (
                    f"Next, task {each.number}, {each.title}: write {stub.name} in {place}{line}.\n"
                    f"The first test that needs it is {result.test}."
                )
    functions = "".join(f"\n    {stub.name} in {directory / stub.path}" for stub in task.stubs)
    about = f"Task {task.number}, {task.title}, is about{functions}\n\n"
    return about + _to_repeat(result, chapter.tasks, directory, folder)


def _to_repeat(result: Result, tasks: Sequence[Task], directory: Path, folder: Path) -> str:
    alone = f"cd {shlex.quote(str(directory))} && python -m pytest {shlex.quote(result.test)}"
    report = indent(explain(result, tasks, folder), " " * 4)
    return f"The first failure is {result.test}:\n\n{report}\n\nTo see it alone:\n\n    {alone}"


def explain(result: Result, tasks: Sequence[Task], folder: Path) -> str:
    """What a test says, the test itself as far as it came, and the last line of the reader's own code."""

    def line(file: str, number: int, text: str) -> str:
        return text or linecache.getline(str(folder / file), number).strip()

    lines = _said(result.failure or "")
    in_tests = [frame for frame in result.frames if frame[0].startswith("tests/")]
    for file, number, text in in_tests[-1:]:
        case = result.test.partition("[")[2].removesuffix("]")
        lines.append(f"in the test, {file}, line {number}{f', case {case}' if case else ''}:")
        lines.append(_listing(folder / file, number) or f"  {line(file, number, text)}")
    for file, number, text in [frame for frame in in_tests[:-1] if not frame[2].startswith("def ")][:1]:
        lines.append(f"called by {file}, line {number}: {line(file, number, text)}")
    places = {stub.path: _functions_in(folder / stub.path) for task in tasks for stub in task.stubs}
    own = [
        f"in your {stub.name}, line {number - node.lineno + 1} of it: {line(file, number, text)}"
        for file, number, text in reversed(result.frames)
        for task in tasks
        for stub in task.stubs
        if file == stub.path and (node := places[file].get(stub.name))
        if node.lineno <= number <= (node.end_lineno or 0)
    ]
    printed = [f"printed until then:\n{indent(result.printed.rstrip(), '  ')}"] if result.printed else []
    return "\n".join([*lines, *own[:1], *printed])


def _said(failure: str) -> list[str]:
    """A failure's message without what only the tests' author can use: objects' addresses, and options of pytest."""
    message = failure.strip().removeprefix("AssertionError: ").removeprefix("Failed: ").splitlines()
    lines = [re.sub(r"^assert (?=got )|^  (?=\w)", "", line) for line in message if not _NOISE.search(line)]
    lines = [re.sub(r"^assert ", "not true: ", line) for line in lines]
    lines = [re.sub(r"^DID NOT RAISE (.+)", r"\1 was to be raised, and was not", line) for line in lines]
    while lines and not lines[-1]:
        lines.pop()
    return [*lines[:_LINES], *(["…"] if len(lines) > _LINES else [])] or ["the marked line is not true"]


def _listing(file: Path, number: int) -> str:
    """The function around a line, up to the end of the statement there; an arrow marks the line."""
    around = [node for node in _functions_in(file).values() if node.lineno <= number <= (node.end_lineno or 0)]
    if not around:
        return ""
    statements = [node for node in ast.walk(around[0]) if isinstance(node, ast.stmt) and node is not around[0]]
    ends = [node.end_lineno or 0 for node in statements if node.lineno <= number <= (node.end_lineno or 0)]
    text = file.read_text(encoding="utf-8").splitlines()
    first, end = around[0].lineno, min(ends, default=number)
    shown = [f"{'→' if at == number else ' '} {text[at - 1]}" for at in range(first, end + 1)]
    if len(shown) > _LISTED:
        shown[1 : 1 - _LISTED] = ["      …"]
    return "\n".join(shown)


def in_words(test: str) -> str:
    """The name of a test as a sentence without its end."""
    _, is_function, name = test.rpartition("::")
    return name.removeprefix("test_").replace("_", " ") if is_function else test


def _function(test: str) -> str:
    return test.partition("[")[0]


def _functions_in(file: Path) -> dict[str, Function]:
    try:
        return dict(functions_of(file.read_text(encoding="utf-8")))
    except (OSError, SyntaxError):
        return {}


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
    report: Callable[[list[Result], bool], None] = lambda results, is_last: None,
    options: Sequence[str] = (),
) -> list[Result]:
    """Run tests in a folder, on the package in it.

    Args:
        folder: a `workplace`.
        tests: which to run, as in a `Task`.
        timeout: seconds that one test may take; the first that takes longer is the last that runs.
        launch: runs pytest.
        report: hears of the results so far, and whether they are all.
        options: more of pytest's.

    Raises `CourseError` if the process ended without a result, or pytest is not installed.
    """
    for name in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(name) is None:
            raise CourseError(f"the checks need {name}: run `pip install -e .[dev]` in the repository")

    def wanted(log: Log) -> list[Result]:
        return [result for name, result in log.results.items() if any(fits(name, test) for test in tests)]

    options = ["--timeout=0", "--continue-on-collection-errors", *options]
    options += dict.fromkeys(_function(test) for test in tests)
    env, limits = {**_STUBS_IN_KERNELS, "PYTHONPATH": str(folder)}, (SECONDS_PER_RUN, OUTPUT_LIMIT)
    ended, log = run_pytest(options, env, folder, *limits, "", timeout, launch, lambda log: report(wanted(log), False))
    results, started = wanted(log), log.last("started")
    if ended.stopped == "time":
        raise CourseError(f"the tests were stopped after {SECONDS_PER_RUN} seconds: {_NO_END}")
    if log.last("end") is None and started is not None and started["id"] not in log.results:
        how = f"took longer than {timeout} seconds, and was stopped: {_NO_END}"
        frames = tuple((os.path.relpath(path, folder), line, text) for path, line, text in log.stack)
        results.append(Result(started["id"], f"The test {how if log.stack else 'ended its process'}", frames))
    elif log.last("end") is None or not log.all("collected", "unreadable"):
        tail = "\n".join(ended.output.splitlines()[-20:])
        raise CourseError(
            "the tests ended without a result: something ends the process or cannot be imported. Import the "
            f"package in a shell, or run `python -m pytest` in its folder. The last that the tests wrote:\n{tail}"
        )
    report(results, True)
    return results


def results_of(task: Task, results: Sequence[Result]) -> list[Result]:
    """Those of the task's tests."""
    return [result for result in results if any(fits(result.test, pattern) for pattern in task.tests)]
