"""Runs tests on somebody's package, in a process of its own, and reads what came out."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from minisgl.course.errors import CourseError
from minisgl.course.table import Task
from minisgl.course.workspace import Files, write

SECONDS_PER_TEST = 20
SECONDS_PER_RUN = 900
"""After this the process is killed: some loops cannot be interrupted from within."""

Launch = Callable[[Sequence[str], Path, Mapping[str, str], float], str]
"""Runs pytest with arguments, in a folder, with an environment, for so many seconds at most, and gives what it wrote.
Raises `TimeoutError`."""

_OPTIONS = ["-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--tb=short"]
_STUB = re.compile(r"NotImplementedError\W+(Chapter \d+, task \d+: [\w.]+)")


@dataclass(frozen=True)
class Result:
    """What became of one test.

    Args:
        test: ``file::test[parameters]``.
        failure: the exception, on one line; None if the test passed.
        details: the whole report of the failure.
    """

    test: str
    failure: str | None = None
    details: str = ""

    @property
    def stub(self) -> str | None:
        """The message of the stub that the test ran into, if it did."""
        found = _STUB.search(self.failure or "")
        return found[1] if found else None


def in_a_new_process(arguments: Sequence[str], workplace: Path, environment: Mapping[str, str], seconds: float) -> str:
    """See `Launch`. If time is over, what the tests have started is killed with them."""
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


def run_tests(files: Files, directory: Path, tests: Sequence[str], timeout: int = SECONDS_PER_TEST) -> list[Result]:
    """Run tests of ours on the package in ``directory``, and write nothing there.

    Args:
        files: our tests, which are written to a temporary folder.
        directory: holds the package.
        tests: which to run, as in a `Task`.
        timeout: seconds that one test may take.

    Raises:
        CourseError: the process ended without a result, or pytest is not installed.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as folder:
        workplace = Path(folder) / "tests-of-the-course"
        write(files, workplace)
        return run_tests_of(workplace, tests, timeout, package=directory.absolute())


def run_tests_of(
    workplace: Path,
    tests: Sequence[str],
    timeout: int = SECONDS_PER_TEST,
    package: Path | None = None,
    options: Sequence[str] = (),
    launch: Launch = in_a_new_process,
) -> list[Result]:
    """Run tests that are in a folder, on the package there or in another one, with more options of pytest's.

    Errors as of `run_tests`.
    """
    for name in ("pytest", "pytest_timeout", "hypothesis"):
        if find_spec(name) is None:
            raise CourseError(f"the checks need {name}: run `pip install -e .[dev]` in the repository")
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as folder:
        report = Path(folder) / "report.xml"
        arguments = [*_OPTIONS, f"--timeout={timeout}", f"--junitxml={report}"]
        arguments += [*options, *dict.fromkeys(test.partition("[")[0] for test in tests)]
        try:
            output = launch(arguments, workplace, _environment(package or workplace), SECONDS_PER_RUN)
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
    """Whether ``file::test[parameters]``, or a file that could not be imported, is meant.

    Args:
        test: what ran.
        pattern: a folder, or what a `Task` names.
    """
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
