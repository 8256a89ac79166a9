"""``check``: run a chapter's tests on a reader's package, in a process of its own, and say what to do next."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minisgl.book.course_table import Chapter, CourseError, Task
from minisgl.book.starters import Sources, files_with_tests, find_package, line_of, write

SECONDS_PER_TEST = 20
SECONDS_PER_RUN = 900
"""After this the process is killed: some loops cannot be interrupted from within."""

Launch = Callable[[Sequence[str], Path, Mapping[str, str], float], str]
"""Run pytest with arguments, in a folder, with an environment, for so many seconds at most, and return its output.
Raises `TimeoutError`."""

_OPTIONS = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--tb=short"]
_STUB = re.compile(r"NotImplementedError\W+(Chapter \d+, task \d+: [\w.]+)")


@dataclass(frozen=True)
class Result:
    """What became of one test."""

    test: str  # ``file::test[parameters]``
    failure: str | None = None  # the exception, on one line; None if the test passed
    details: str = ""  # the whole report of the failure

    @property
    def stub(self) -> str | None:
        """The message of the stub that the test ran into, if it did."""
        found = _STUB.search(self.failure or "")
        return found[1] if found else None


def check(sources: Sources, number: int, directory: Path, timeout: int) -> bool:
    """Print what is done and what is next; True if everything is done.

    Args:
        sources: the checkout whose tests are run; the folder's own copies may have been changed.
        directory: the reader's; it is not written to.
        timeout: seconds that one test may take.

    Raises `CourseError` if there is nothing to check, or the tests end without a result.
    """
    chapter = sources.table.chapter_with_tasks(number)
    find_package(directory, chapter)
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as folder:
        workplace = Path(folder) / "tests-of-the-course"
        write(sources.suite(chapter), workplace)
        wanted = [test for task in chapter.tasks for test in task.tests]
        results = run_tests(workplace, wanted, timeout, directory.absolute())
        print(f"Chapter {number}, {chapter.title}: {directory}")
        for task in chapter.tasks:
            print(f"  task {task.number}  {task.title:<60} {_verdict(chapter, task, results_of(task, results))}")
        for task in chapter.tasks:
            if failed := _failed(results_of(task, results)):
                print("\n" + _advice(chapter, task, failed[0], directory))
                return False
        results = run_tests(workplace, files_with_tests(chapter), timeout, directory.absolute())
    failed = _failed(results)
    print(f"  all tests of the chapter: {len(results) - len(failed)} of {len(results)} pass")
    print("\n" + _report(failed[0], directory) if failed else "All tasks are done.")
    return not failed


def _failed(results: Sequence[Result]) -> list[Result]:
    return [result for result in results if result.failure is not None]


def _verdict(chapter: Chapter, task: Task, results: Sequence[Result]) -> str:
    failed = _failed(results)
    if not failed:
        return f"passed ({len(results)} {'test' if len(results) == 1 else 'tests'})"
    met = next((each for each in chapter.tasks if any(result.stub in each.messages for result in failed)), None)
    if met is None:
        return f"FAILED ({len(failed)} of {len(results)} tests)"
    return "not written yet" if met == task else f"needs task {met.number}"


def _advice(chapter: Chapter, task: Task, result: Result, directory: Path) -> str:
    """What a reader should do about the first failure."""
    for each in chapter.tasks:
        for stub in each.stubs:
            if result.stub == each.message(stub):
                path = directory / stub.path
                line = line_of(path.read_text(encoding="utf-8"), stub.name)
                return (
                    f"Next, task {each.number}, {each.title}: write {stub.name} in {path}"
                    f"{f', line {line}' if line else ''}.\nThe first test that needs it is {result.test}."
                )
    functions = "".join(f"\n    {stub.name} in {directory / stub.path}" for stub in task.stubs)
    return f"Task {task.number}, {task.title}, is about{functions}\n\n{_report(result, directory)}"


def _report(result: Result, directory: Path) -> str:
    alone = f"cd {shlex.quote(str(directory))} && python -m pytest {shlex.quote(result.test)}"
    details = result.details.strip().replace("\n", "\n    ")
    return f"The first failure is {result.test}:\n\n    {details}\n\nTo see it alone:\n\n    {alone}"


# -- running tests ---------------------------------------------------------------------------------------------------


def in_a_new_process(arguments: Sequence[str], workplace: Path, environment: Mapping[str, str], seconds: float) -> str:
    """A `Launch`. If time is over, pytest is killed with the processes that the tests have started."""
    command = [sys.executable, "-m", "pytest", *arguments]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        process = subprocess.Popen(
            command, cwd=workplace, env=environment, stdout=output, stderr=output, start_new_session=True
        )
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired as error:
            raise TimeoutError from error
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        output.seek(0)
        return output.read()


def run_tests(
    workplace: Path, tests: Sequence[str], timeout: int, package: Path, launch: Launch = in_a_new_process
) -> list[Result]:
    """Run tests that are in a folder, on the package in the same folder or in another one.

    Args:
        workplace: holds the tests.
        tests: which to run, as in a `Task`.
        timeout: seconds that one test may take.
        package: folder that holds the package.
        launch: runs pytest.

    Raises `CourseError` if the process ended without a result, or pytest is not installed.
    """
    for name in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(name) is None:
            raise CourseError(f"the checks need {name}: run `pip install -e .[dev]` in the repository")
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as folder:
        report = Path(folder) / "report.xml"
        arguments = [*_OPTIONS, f"--timeout={timeout}", f"--junitxml={report}"]
        arguments += dict.fromkeys(test.partition("[")[0] for test in tests)
        try:
            output = launch(arguments, workplace, _environment(package), SECONDS_PER_RUN)
        except TimeoutError as error:
            raise CourseError(
                f"the tests were stopped after {SECONDS_PER_RUN} seconds: look for a loop without an end"
            ) from error
        if not report.is_file():
            tail = "\n".join(output.splitlines()[-20:])
            raise CourseError(
                "the tests ended without a result: something ends the process or cannot be imported. Import the "
                f"package in a shell, or run `python -m pytest` in its folder. The last that the tests wrote:\n{tail}"
            )
        results = _read(report)
    return [result for result in results if any(fits(result.test, test) for test in tests)]


def results_of(task: Task, results: Sequence[Result]) -> list[Result]:
    """Those of the task's tests."""
    return [result for result in results if any(fits(result.test, test) for test in task.tests)]


def fits(test: str, pattern: str) -> bool:
    """Whether what ran, ``file::test[parameters]`` or a file that could not be imported, is what a `Task` names."""
    name, _, parameters = test.partition("[")
    wanted, _, parameter = pattern.partition("[")
    if wanted.startswith(f"{name}::") and name.endswith(".py"):
        return True
    if not (name == wanted or name.startswith((f"{wanted}::", f"{wanted}/"))):
        return False
    return not parameter or f"-{parameter.rstrip(']')}-" in f"-{parameters.rstrip(']')}-"


def _environment(package: Path) -> dict[str, str]:
    """The package comes behind the tests on the path, and before an installed one."""
    return {
        **os.environ,
        "PYTHONPATH": str(package),
        "PYTHONDONTWRITEBYTECODE": "1",
        # Plugins that happen to be installed take seconds to load, and change what is tested.
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        # A stub in a kernel raises what it says, not an error of the interpreter's own.
        "TRITON_FRONT_END_DEBUGGING": "1",
    }


def _read(report: Path) -> list[Result]:
    results = []
    for case in ET.parse(report).iter("testcase"):
        troubles = [*case.iter("failure"), *case.iter("error")]
        test = _test_name(case.get("classname", ""), case.get("name", ""))
        if case.find("skipped") is not None:
            results.append(Result(test, "the test was skipped"))
        elif troubles:
            # A file that cannot be imported has its reason in the text only.
            message, text = troubles[0].get("message", ""), troubles[0].text or ""
            results.append(Result(test, text if message == "collection failure" else message, text))
        else:
            results.append(Result(test))
    return results


def _test_name(classname: str, name: str) -> str:
    """``tests.kvcache.test_radix`` or ``….test_radix.TestClass`` and a name, as pytest takes it."""
    if not classname:  # a file that could not be imported
        return name.replace(".", "/") + ".py"
    parts = classname.split(".")
    at = next((i for i, part in enumerate(parts) if part.startswith("test_")), len(parts) - 1)
    return "::".join(["/".join(parts[: at + 1]) + ".py", *parts[at + 1 :], name])
