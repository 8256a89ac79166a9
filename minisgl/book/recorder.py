"""The process that runs tests over a reader's code: run pytest, and record each event as it happens.

``python recorder.py FILE SECONDS MODULE:CLASS PYTEST-ARGUMENT …`` appends one JSON object a line to ``FILE``. Before
the tests it imports the class, unless that argument is empty. A test that takes longer than ``SECONDS`` ends the
process, and its stack is appended as text. The last line says how far a process came that ended early.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
from collections.abc import Generator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import pytest

MESSAGE_LENGTH = 2000
"""Characters that are kept of a failure's message, and of what a failing test printed."""

SECONDS_TO_IMPORT = 180.0

Report = pytest.CollectReport | pytest.TestReport
Frame = tuple[str, int, str]
"""File, line and text of a call."""


class Recorder:
    """Pytest plugin that appends events to a file. One test may take ``seconds``, or any time if that is 0."""

    def __init__(self, file: Path, seconds: float) -> None:
        self._file, self._seconds, self._pid = file, seconds, os.getpid()
        self._stack = file.open("a", encoding="utf-8")
        self._end_in(SECONDS_TO_IMPORT)

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; a fork of this process can only say that it exists."""
        if os.getpid() != self._pid:
            event, fields = "forked", {}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def _end_in(self, seconds: float) -> None:
        """End the process with its stack when time is over, also where Python runs no other thread."""
        if self._seconds:
            faulthandler.dump_traceback_later(seconds, file=self._stack, exit=True)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Run tests in the order of the arguments, which is that of the tasks, and all cases of a test together."""
        tests = list(dict.fromkeys(item.nodeid.partition("[")[0] for item in items))

        def place(item: pytest.Item) -> tuple[int, int]:
            name = item.nodeid.partition("[")[0]
            fitting = (i for i, argument in enumerate(config.args) if f"{name}::".startswith(f"{argument}::"))
            return next(fitting, 0), tests.index(name)

        items.sort(key=place)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            _, *names = item.nodeid.split("::")
            self.write("collected", id=item.nodeid, file=str(item.path), name="::".join(names).partition("[")[0])

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: Report) -> None:
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value.__cause__
            info = None if error is None else pytest.ExceptionInfo.from_exception(error)
            message = _message(report) if info is None else info.exconly(tryshort=True)
            self._result("unreadable", report, _shortened(message), _frames(info))

    def pytest_assertrepr_compare(self, op: str, left: object, right: object) -> list[str] | None:
        """Say of an equation what the reader's code gave, which is on the left in our tests, and what was expected."""
        return _equation(left, right) if op == "==" else None

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write("started", id=nodeid)
        self._end_in(self._seconds)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record the end of a test, and an exit inside it; one that is skipped has not passed."""
        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(SystemExit):
            self.write("exit", id=report.nodeid)
        if report.when == "call" or not report.passed:
            self._result("tested", report, "" if report.passed else _message(report), _frames(call.excinfo))
        return report

    def _result(self, event: str, report: Report, message: str, frames: list[Frame]) -> None:
        printed = "" if report.passed else _shortened(report.capstdout)
        self.write(event, id=report.nodeid, passed=report.passed, message=message, printed=printed, frames=frames)


def _message(report: Report) -> str:
    if report.skipped:
        return "the test was skipped"
    crash = getattr(report.longrepr, "reprcrash", None)
    return _shortened(str(report.longrepr) if crash is None else crash.message)


def _equation(left: object, right: object) -> list[str] | None:
    if type(right).__name__.startswith("Approx"):
        return None
    try:
        return [f"got       {_short(left)}", f"expected  {_short(right)}", *_difference(left, right)]
    except Exception:  # of the objects' own; pytest then says what it can
        return None


def _difference(left: object, right: object) -> list[str]:
    """Where two long collections differ first."""
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        keys = [key for key in {**right, **left} if (key in left, left.get(key)) != (key in right, right.get(key))]
        return [f"they differ at  {_short(keys)}"]
    if isinstance(left, Set) and isinstance(right, Set):
        return [f"missing   {_short(list(right - left))}", f"too many  {_short(list(left - right))}"]
    if not isinstance(left, (list, tuple)) or not isinstance(right, (list, tuple)) or len(left) + len(right) < 12:
        return []
    for index, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return [f"they differ at index {index} first: {_short(mine)}, expected {_short(theirs)}"]
    return [f"the one has {len(left)} items, the other {len(right)}"]


def _short(item: object) -> str:
    """One line for an object, with its beginning and its end if it is long."""
    text = " ".join(repr(item).split())
    return text if len(text) <= 160 else f"{text[:100]} … {text[-56:]}"


def _frames(error: pytest.ExceptionInfo[BaseException] | None) -> list[Frame]:
    """File, line and text of each call in the current folder, the outermost first.

    Those of an environment that was made in the folder are left out: to find their text takes longer than most tests.
    """
    here, environment = f"{os.getcwd()}{os.sep}", f"{sys.prefix}{os.sep}"
    entries = [
        entry
        for entry in ([] if error is None else error.traceback)
        if str(entry.path).startswith(here) and not str(entry.path).startswith(environment)
    ]
    return [(str(entry.path)[len(here) :], entry.lineno + 1, str(entry.statement).strip()) for entry in entries]


def _shortened(text: str) -> str:
    """The beginning of a message; characters that no terminal could print are written out."""
    return text[:MESSAGE_LENGTH].encode(errors="backslashreplace").decode()[:MESSAGE_LENGTH]


def main(arguments: Sequence[str]) -> None:
    """Import the submission, run pytest with the other arguments, and end the process."""
    file, seconds, submission, *options = arguments
    recorder = Recorder(Path(file), float(seconds))
    sys.path.insert(0, os.getcwd())
    try:
        if submission:
            from minisgl.registry import import_path  # not above: a reader's own package may have come to harm

            import_path("submission", submission)
    except BaseException as error:
        if isinstance(error.__cause__, SystemExit):
            recorder.write("exit", id=f"the import of {submission} (SystemExit: {error.__cause__.code})")
        else:
            recorder.write("no-import", message=_shortened(f"{type(error).__name__}: {error}"))
    else:
        code = pytest.main(options, plugins=[recorder])
        recorder.write("end", code=int(code))
    # Not the ordinary way out: threads and exit handlers of the submission have no say any more.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
