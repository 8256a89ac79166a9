"""Run a program with limits on time and output, end all its processes, and read what the recorder wrote in them.

It is no sandbox: files are open to the program.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import psutil

KEPT_OUTPUT = 4000
"""Bytes of output that are kept; the others are counted."""

_MARK = "MINISGL_SUPERVISED"
"""Environment variable by which descendants are recognised, whatever process group they have moved to."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How a program ended."""

    seconds: float  # that it ran
    exit_code: int | None  # of the process; None if it was stopped
    stopped: str | None  # why it was: ``"time"`` or ``"output"``
    output: str  # the beginning of what it wrote to both streams, and how much that was
    output_bytes: int
    left_behind: int  # processes that it had started and that still ran when it ended by itself


class Launch(Protocol):
    """Runs a command with limits, as `run_bounded` does."""

    def __call__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        cwd: Path,
        time_limit: float,
        output_limit: int,
        watch: Callable[[], None] = ...,
    ) -> Ended: ...


def run_bounded(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    time_limit: float,
    output_limit: int,
    watch: Callable[[], None] = lambda: None,
) -> Ended:
    """Run a command in a process group of its own; none of its processes is left when this returns.

    Args:
        command, env, cwd: the program, its environment, and the folder where it runs.
        time_limit: seconds until it is killed.
        output_limit: bytes after which it is killed.
        watch: called many times a second while it runs.
    """
    mark = uuid.uuid4().hex
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env={**env, _MARK: mark},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout as stream:
        os.set_blocking(stream.fileno(), False)
        kept, written, stopped = b"", 0, None
        while stopped is None:
            running = process.poll() is None
            chunk = _read(stream.fileno(), wait=0.05 if running else 0.0)
            kept += chunk[: KEPT_OUTPUT - len(kept)]
            written += len(chunk)
            watch()
            if not chunk:
                if not running:
                    break
                time.sleep(0.01)  # it may have closed its output, and then there is nothing to wait for
            if written > output_limit:
                stopped = "output"
            elif time.monotonic() - start > time_limit:
                stopped = "time"
        seconds = time.monotonic() - start
        left_behind = 0 if stopped else len(_marked(mark))
        _end(process, mark)
    code = None if stopped else process.returncode
    return Ended(seconds, code, stopped, kept.decode(errors="replace"), written, left_behind)


def _read(descriptor: int, wait: float) -> bytes:
    """Up to 64 KiB, after waiting for them; nothing at the end, and if nothing comes."""
    if not select.select([descriptor], [], [], wait)[0]:
        return b""
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


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


# -- what was recorded -------------------------------------------------------------------------------------------------

_STACK_LINE = re.compile(r'^  File "(.+)", line (\d+) in ', re.MULTILINE)


def recorded(file: Path, submission: str, seconds: float, options: Sequence[str]) -> list[str]:
    """The command that runs `minisgl.book.recorder`; its file is run, since a reader's package may not have it."""
    recorder = str(Path(__file__).with_name("recorder.py"))
    return [sys.executable, "-P", recorder, str(file), str(seconds), submission, *options]


class Log:
    """The events that the recorder has written so far, or until it ended or was killed."""

    def __init__(self, file: Path) -> None:
        text = file.read_text(encoding="utf-8", errors="replace") if file.exists() else ""
        # The last line of a process that was killed may be half a line.
        lines = [line for line in text.splitlines() if line.startswith("{") and line.endswith("}")]
        self.events: list[dict[str, Any]] = [json.loads(line) for line in lines]
        self.passed: dict[str, bool] = {}
        for event in self.all("tested"):
            self.passed[event["id"]] = event["passed"] and self.passed.get(event["id"], True)
        # The stack at the end of time; its text is not recorded, and the innermost call comes first.
        self.stack = [(path, int(line), "") for path, line in reversed(_STACK_LINE.findall(text))]

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind, in order."""
        return [event for event in self.events if event["event"] == kind]

    def last(self, kind: str) -> dict[str, Any] | None:
        """The last event of a kind, if there was one."""
        return next(reversed(self.all(kind)), None)
