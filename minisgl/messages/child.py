"""The life of a child process, seen from inside: how it is told what to do, and how it ends.

A child is ``python -m MODULE``. Its options come over its standard input as one line of JSON, never as arguments that
others could read, and never pickled. Over its standard output it reports `Ready`, or why it cannot go on. Standard
input stays open: its end means that the parent has died, and so does the child, whatever it is doing.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from types import FrameType
from typing import TypeVar

import msgspec

from minisgl.core.heap import freeze_heap
from minisgl.messages.failure import Failure
from minisgl.messages.logs import configure_logs
from minisgl.messages.options import ChildOptions

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The child is at work.

    Args:
        info: what the parent wants to know of it.
    """

    info: dict[str, int] = {}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The child ends, because of this."""

    failure: Failure


Report = Ready | Failed

Options = TypeVar("Options", bound=ChildOptions)


@contextmanager
def child_process(kind: type[Options]) -> Iterator[tuple[Options, Callable[[Ready], None]]]:
    """Live as a child: gives the options, and the function that reports to the parent.

    With its report of `Ready` the child's heap is frozen. The process ends with the block: with exit code 0 after
    SIGTERM, and with 1 after an error, which is reported and logged.
    """
    reports = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no report
    commands = FileIO(sys.stdin.fileno(), closefd=False)
    options = msgspec.json.decode(commands.readline(), type=kind)
    configure_logs(options.name, options.log_format)
    signal.signal(signal.SIGTERM, _leave)
    _end_with_parent(commands, options)

    def report(what: Report) -> None:
        if isinstance(what, Ready):
            freeze_heap()
        reports.write(msgspec.json.encode(what) + b"\n")
        reports.flush()

    code = 0
    try:
        yield options, report
    except Exception as error:
        logger.exception("ends with an error")
        report(Failed(Failure.of(error)))
        code = 1
    finally:
        logging.shutdown()
        os._exit(code)  # at once: an interpreter that has loaded PyTorch takes seconds to clean up for nobody


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(0)


def _end_with_parent(commands: FileIO, options: ChildOptions) -> None:
    if sys.platform == "linux" and not options.sweeps:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    threading.Thread(target=_await_end, args=(commands, options), name="parent-watch", daemon=True).start()


def _await_end(commands: FileIO, options: ChildOptions) -> None:
    while commands.read(1):
        pass
    if options.sweeps:
        shutil.rmtree(Path(options.directory), ignore_errors=True)
    os._exit(1)
