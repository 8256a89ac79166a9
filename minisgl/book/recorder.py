"""The process in which a submission is graded: import it, run pytest, and record each event as it happens.

``python -m minisgl.book.recorder FILE MODULE:CLASS PYTEST-ARGUMENT …`` appends one JSON object a line to ``FILE``. If
the submission ends the process, the last line says how far it came.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest

from minisgl.registry import import_path

MESSAGE_LENGTH = 2000
"""Characters that are kept of a failure's message."""


class Recorder:
    """Pytest plugin that appends events to a file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._pid = os.getpid()

    def write(self, event: str, **fields: Any) -> None:
        """Append an event; a fork of this process can only say that it exists."""
        if os.getpid() != self._pid:
            event, fields = "forked", {}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"event": event, **fields}) + "\n")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Record which tests are going to run."""
        for item in session.items:
            _, *names = item.nodeid.split("::")
            self.write("collected", id=item.nodeid, file=str(item.path), name="::".join(names).partition("[")[0])

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Record a file of tests that cannot be read, which is not the submission's fault."""
        if report.failed:
            self.write("unreadable", message=_message(report))

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Record the beginning of a test."""
        self.write("started", id=nodeid)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Record an exit inside a test, which pytest takes for a failure."""
        report = yield
        if call.excinfo is not None and call.excinfo.errisinstance(SystemExit):
            self.write("exit", id=report.nodeid)
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Record the end of a test; one that is skipped has not passed."""
        if report.when == "call" or not report.passed:
            message = "" if report.passed else _message(report)
            self.write("tested", id=report.nodeid, passed=report.passed, message=message)


def _message(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    return _shortened(str(report.longrepr) if crash is None else crash.message)


def _shortened(text: str) -> str:
    """The beginning of a message; characters that no terminal could print are written out."""
    return text[:MESSAGE_LENGTH].encode(errors="backslashreplace").decode()[:MESSAGE_LENGTH]


def main(arguments: Sequence[str]) -> None:
    """Import the submission, run pytest with the other arguments, and end the process."""
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
