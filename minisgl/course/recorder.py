"""The process in which a submission is graded: imports it, runs pytest, and writes down each thing as it happens.

``python -m minisgl.course.recorder FILE MODULE:CLASS PYTEST-ARGUMENT …`` appends one JSON object a line to ``FILE``.
What is missing at the end tells its reader how far the submission let it come.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.core.registry import import_path

MESSAGE_LENGTH = 2000
"""Characters that are kept of a failure's message."""


class Recorder:
    """Pytest plugin.

    Args:
        file: to append to.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pid = os.getpid()

    def write(self, event: str, **fields: Any) -> None:
        """Append an event. A copy of this process, made by a fork, can only say that it exists."""
        if os.getpid() != self._pid:
            event, fields = "forked", {}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Say what is going to be run."""
        for item in session.items:
            _, *names = item.nodeid.split("::")
            self.write("collected", id=item.nodeid, file=str(item.path), name="::".join(names).partition("[")[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file of tests that cannot be read: no fault of the submission's."""
        if report.failed:
            self.write("unreadable", message=_message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """A test begins."""
        self.write("started", id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Pytest takes an exit inside a test for a failure; the report should say more."""
        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(SystemExit):
            self.write("exit", id=report.nodeid)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test ends. One that is skipped has not passed."""
        if report.when == "call" or not report.passed:
            message = "" if report.passed else _message(report)
            self.write("tested", id=report.nodeid, passed=report.passed, message=message)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return _shortened(str(report.longrepr) if crash is None else crash.message)


def _shortened(text: str) -> str:
    """What a report keeps of a message; characters that no terminal could print are written out."""
    return text[:MESSAGE_LENGTH].encode(errors="backslashreplace").decode()[:MESSAGE_LENGTH]


def main(arguments: Sequence[str]) -> None:
    """See the module."""
    file, submission, *options = arguments
    recorder = Recorder(Path(file))
    sys.path.insert(0, os.getcwd())
    try:
        import_path("submission", submission)
    except SystemExit as error:
        recorder.write("exit", id=f"the import of {submission} ({type(error).__name__}: {error.code})")
    except BaseException as error:
        recorder.write("no-import", message=_shortened(f"{type(error).__name__}: {error}"))
    else:
        code = pytest.main(options, plugins=[recorder])
        recorder.write("end", code=int(code))
    # Not the ordinary way out: threads and exit handlers of the submission have no say any more.
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
