"""Run pytest over a reader's code: with limits on time and output, none of its processes left, and all results read.

It is no sandbox: files are open to the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

KEPT_OUTPUT = 4000  # bytes of output that are kept; the others are counted

_MARK = "MINISGL_SUPERVISED"
"""Environment variable by which descendants are recognised, whatever process group they have moved to."""
_PLUGINS = ("-p", "no:cacheprovider", "-p", "pytest_timeout", "-p", "_hypothesis_pytestplugin")
"""Of pytest. Others that happen to be installed take seconds to load, and change what is tested."""
_NO_OTHER_PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
_STACK_LINE = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)
_STUB = re.compile(r"NotImplementedError\W+(Chapter \d+, task \d+: [\w.]+)")


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    seconds: float  # that it ran
    exit_code: int | None  # of the process; None if it was stopped
    stopped: str | None  # why it was: ``"time"`` or ``"output"``
    output: str  # the beginning of what it wrote to both streams, and how much that was
    output_bytes: int
    left_behind: int  # processes that it had started and that still ran when it ended by itself


Launch = Callable[[Sequence[str], Mapping[str, str], Path, float, int, Callable[[], None]], Ended]
"""Runs a command with limits, as `run_bounded` does."""


def run_bounded(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    time_limit: float,
    output_limit: int,
    watch: Callable[[], None],
) -> Ended:
    """Run a command in a process group of its own; none of its processes is left when this returns.

    It is killed after ``time_limit`` seconds or ``output_limit`` bytes; ``watch`` is called many times a second.
    """
    mark, start, stopped = uuid.uuid4().hex, time.monotonic(), None
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env={**env, _MARK: mark},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        while process.poll() is None and stopped is None:
            time.sleep(0.02)
            watch()
            if time.monotonic() - start > time_limit:
                stopped = "time"
            if os.fstat(output.fileno()).st_size > output_limit:
                stopped = "output"
        seconds = time.monotonic() - start
        left_behind = 0 if stopped else len(_marked(mark))
        _end(process, mark)
        written = output.seek(0, os.SEEK_END)
        output.seek(0)
        kept = output.read(KEPT_OUTPUT).decode(errors="replace")
    if written > output_limit:
        stopped = "output"
    return Ended(seconds, None if stopped else process.returncode, stopped, kept, written, left_behind)


def _end(process: subprocess.Popen[bytes], mark: str) -> None:
    """Kill the group, and processes that left it, until none is found any more."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    while found := _marked(mark):
        for other in found:
            with contextlib.suppress(psutil.Error):
                other.kill()
        psutil.wait_procs(found, timeout=1.0)


def _marked(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


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


class Log:
    """The events that the recorder has written so far, or until it ended or was killed.

    ``results`` has what became of each test that has ended, by its name; ``stack`` the calls at the end of time.
    """

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        # The last line of a process that was killed may be half a line.
        lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        self.events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.results: dict[str, Result] = {}
        for event in self.all("tested", "unreadable"):
            name, known = event["id"], self.results.get(event["id"])
            if known is None or known.failure is None:  # a test that passed may still fail when it is taken down
                failure, frames = None if event["passed"] else event["message"], tuple(map(tuple, event["frames"]))
                self.results[name] = Result(name, failure, frames, event["printed"])
        # Its text is not recorded, and the innermost call comes first.
        self.stack = tuple((path, int(line), "") for path, line in reversed(_STACK_LINE.findall(text)))

    def all(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of some kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind, if there was one."""
        return next(reversed(self.all(kind)), None)


def run_pytest(
    options: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    time_limit: float,
    output_limit: int,
    submission: str = "",
    seconds: float = 0,
    launch: Launch = run_bounded,
    report: Callable[[Log], None] = lambda log: None,
) -> tuple[Ended, Log]:
    """Run pytest as `minisgl.book.recorder` does, without a trace in ``cwd``.

    Args:
        env: changes to the environment.
        submission: ``module:Class`` to be imported first.
        seconds: that one test may take; 0 for any number.
        report: hears of new events while tests run.
    """
    with tempfile.TemporaryDirectory(prefix="minisgl-course-") as scratch:
        events, size = Path(scratch) / "events.jsonl", 0

        def watch() -> None:
            nonlocal size
            if events.exists() and events.stat().st_size > size:
                size = events.stat().st_size
                report(Log(events))

        # The recorder's file is run, since a reader's package may not have it.
        command = [sys.executable, "-P", str(Path(__file__).with_name("recorder.py")), str(events), str(seconds)]
        command += [submission, *_PLUGINS, "-q", "--tb=no", "--no-header"]
        command += [f"--basetemp={scratch}/tmp", *options]
        quiet = {"PYTHONDONTWRITEBYTECODE": "1", "HYPOTHESIS_STORAGE_DIRECTORY": scratch, **_NO_OTHER_PLUGINS}
        ended = launch(command, {**os.environ, **quiet, **env}, cwd, time_limit, output_limit, watch)
        return ended, Log(events)


def fits(test: str, pattern: str) -> bool:
    """Whether what ran, ``file::test[parameters]`` or a file that could not be imported, is what a task names."""
    name, _, parameters = test.partition("[")
    wanted, _, parameter = pattern.partition("[")
    if wanted.startswith(f"{name}::") and name.endswith(".py"):
        return True
    if not (name == wanted or name.startswith((f"{wanted}::", f"{wanted}/"))):
        return False
    return not parameter or f"-{parameter.rstrip(']')}-" in f"-{parameters.rstrip(']')}-"
