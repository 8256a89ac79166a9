"""The child's side of a child process: its options, reports, heartbeats and end. `minisgl.processes` is the parent's.

The parent writes options, then pings, to standard input; the child writes reports, heartbeats and answers to pings to
standard output, one a line.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec

from minisgl.errors import ConfigError, Failure, ModelLoadError
from minisgl.logs import configure_logs


def freeze_heap() -> None:
    """Exclude all present objects from garbage collection; for our own processes, once they have started.

    With PyTorch and a model loaded, a full collection visits 200,000 to 400,000 objects and stops Python for up to 0.2
    s. Reference cycles that exist now are never freed, until `gc.unfreeze`.
    """
    gc.collect()
    gc.freeze()


logger = logging.getLogger(__name__)

BEAT_INTERVAL = 0.5  # seconds between two heartbeats, and the longest sleep of a loop without work
BEAT = b""  # the line of a heartbeat
HERE = b"here"  # the line that answers a ping
_PR_SET_PDEATHSIG = 1
_writing = threading.Lock()  # the main loop reports, and the thread beside it answers


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """The options that every child has."""

    name: str  # of the process, for log lines and for its socket
    directory: str = ""  # of the sockets that it shares with other children, if there are any
    log_format: str | None = None  # "text" or "json"; None leaves Python's logging as it is
    sweeps: bool = False  # outlives a dead parent to remove the directory; the kernel ends the other children


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child has started; ``info`` is for the parent."""

    info: dict[str, Any] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child ends because of this error."""

    failure: Failure


ChildReport = Ready | Failed
Options = TypeVar("Options", bound=ChildOptions)


class _Pulse:
    """When the next heartbeat is due, and the file that it is written to; none in a process that is no child."""

    fd: int | None = None
    due = 0.0


def beat() -> None:
    """Send a heartbeat of the main loop, if one is due. Does nothing in a process that is no child."""
    if _Pulse.fd is not None and (now := time.monotonic()) >= _Pulse.due:
        _Pulse.due = now + BEAT_INTERVAL
        _tell_parent(_Pulse.fd, BEAT)


@contextmanager
def child_process(kind: type[Options]) -> Iterator[tuple[Options, Callable[[Ready], None]]]:
    """Run the ``with`` block as a child, with its options and a function that reports `Ready` to the parent.

    `Ready` also freezes the heap and starts the heartbeats. The process ends with the block: exit code 0 after SIGTERM,
    1 after an error, which is reported, and logged unless it comes at the start and says itself what to do.
    """
    reports = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no report
    commands = FileIO(sys.stdin.fileno(), closefd=False)
    options = msgspec.json.decode(commands.readline(), type=kind)
    if options.log_format is not None:
        configure_logs(options.name, options.log_format)
    signal.signal(signal.SIGTERM, _leave)
    _end_with_parent(commands, reports, options)

    def report(what: ChildReport) -> None:
        if isinstance(what, Ready):
            freeze_heap()
            _Pulse.fd = reports
        _tell_parent(reports, msgspec.json.encode(what))

    code = 0
    try:
        yield options, report
    except Exception as error:
        code = 1
        if _Pulse.fd is not None or not isinstance(error, ConfigError | ModelLoadError):
            logger.exception("ends with an error")
        report(Failed(Failure.of(error)))
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: an interpreter that has loaded PyTorch takes seconds to clean up


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _end_with_parent(commands: FileIO, reports: int, options: ChildOptions) -> None:
    if sys.platform == "linux" and not options.sweeps:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow_parent, args=(commands, reports, options), name="parent-watch", daemon=True).start()


def _follow_parent(commands: FileIO, reports: int, options: ChildOptions) -> None:
    """Answer the parent's pings, and end with it."""
    with suppress(BrokenPipeError):
        while commands.read(1):
            _write_line(reports, HERE)
    if options.sweeps:
        shutil.rmtree(Path(options.directory), ignore_errors=True)
    os._exit(1)


def _tell_parent(fd: int, line: bytes) -> None:
    """Write a line; or, if the parent is dead, wait for `_follow_parent` to clean up and to end the process."""
    try:
        _write_line(fd, line)
    except BrokenPipeError:
        while True:
            time.sleep(BEAT_INTERVAL)


def _write_line(fd: int, line: bytes) -> None:
    rest = memoryview(line + b"\n")
    with _writing:
        while rest:
            rest = rest[os.write(fd, rest) :]
