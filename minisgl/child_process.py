"""A child process, seen from inside: how it is told what to do, says how it is, and ends.

A child is ``python -m MODULE``, started by `minisgl.processes.ChildProcess`. Its options come over standard input as
one line of JSON: others cannot read them there as they could on the command line, and nothing is pickled. Over
standard output it reports, a line each:

- `Ready`, once, when it has started; `Failed` when it ends because of an error.
- A heartbeat, an empty line. `beat` sends it from the main loop: at every turn, and while the loop waits for something
  (a message, a full socket, other processes), but at most once in `BEAT_INTERVAL`. So it proves that the loop goes on.
- ``here``, the answer to a ping on standard input. A thread beside the loop gives it, so it proves only that the
  process is not stopped. The parent asks for it when heartbeats cease: a step in which a kernel is compiled, or the
  prefill of a long prompt on a CPU, is longer than the time after which a stopped process has to be noticed.

Standard input stays open. Its end means that the parent has died, and then the child ends, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import msgspec

from minisgl.core.heap import freeze_heap
from minisgl.errors import Failure
from minisgl.logs import configure_logs

logger = logging.getLogger(__name__)

BEAT_INTERVAL = 0.5
"""Seconds between two heartbeats, and for which a loop without work sleeps at most."""
BEAT = b""
HERE = b"here"

_PR_SET_PDEATHSIG = 1
_writing = threading.Lock()  # the main loop reports, and the thread beside it answers


class ChildOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What every child is told.

    Args:
        name: of the process, for log lines and for its socket.
        directory: of the sockets that it shares with other children, if there are any.
        log_format: ``"text"`` or ``"json"``; None leaves Python's logging as it is.
        sweeps: whether this child removes the directory when the parent has died. It must outlive it for that, while
            the others are ended by the kernel.
    """

    name: str
    directory: str = ""
    log_format: str | None = None
    sweeps: bool = False


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child has started. ``info`` is what the parent wants to know of it."""

    info: dict[str, Any] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child ends because of this."""

    failure: Failure


Report = Ready | Failed

Options = TypeVar("Options", bound=ChildOptions)


class _Pulse:
    """When the next heartbeat is due, and the file that it is written to; none in a process that is no child."""

    fd: int | None = None
    due = 0.0


def beat() -> None:
    """Tell the parent that the main loop goes on. Does nothing in a process that is no child."""
    if _Pulse.fd is not None and (now := time.monotonic()) >= _Pulse.due:
        _Pulse.due = now + BEAT_INTERVAL
        _write_line(_Pulse.fd, BEAT)


@contextmanager
def child_process(kind: type[Options]) -> Iterator[tuple[Options, Callable[[Ready], None]]]:
    """Live as a child: gives the options, and the function that reports to the parent.

    With its report of `Ready` the child's heap is frozen, and its heartbeats begin. The process ends with the block:
    with exit code 0 after SIGTERM, and with 1 after an error, which is reported and logged.
    """
    reports = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no report
    commands = FileIO(sys.stdin.fileno(), closefd=False)
    options = msgspec.json.decode(commands.readline(), type=kind)
    if options.log_format is not None:
        configure_logs(options.name, options.log_format)
    signal.signal(signal.SIGTERM, _leave)
    _end_with_parent(commands, reports, options)

    def report(what: Report) -> None:
        if isinstance(what, Ready):
            freeze_heap()
            _Pulse.fd = reports
        _write_line(reports, msgspec.json.encode(what))

    code = 0
    try:
        yield options, report
    except Exception as error:
        code = 1
        logger.exception("ends with an error")
        report(Failed(Failure.of(error)))
    finally:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # at once: an interpreter that has loaded PyTorch takes seconds to clean up for nobody


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _end_with_parent(commands: FileIO, reports: int, options: ChildOptions) -> None:
    if sys.platform == "linux" and not options.sweeps:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_follow_parent, args=(commands, reports, options), name="parent-watch", daemon=True).start()


def _follow_parent(commands: FileIO, reports: int, options: ChildOptions) -> None:
    """Answer the parent's pings, and end with it."""
    while commands.read(1):
        _write_line(reports, HERE)
    if options.sweeps:
        shutil.rmtree(Path(options.directory), ignore_errors=True)
    os._exit(1)


def _write_line(fd: int, line: bytes) -> None:
    rest = memoryview(line + b"\n")
    with _writing:
        while rest:
            rest = rest[os.write(fd, rest) :]
