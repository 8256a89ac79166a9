"""The life of a child process, seen from its parent: how it is started, watched and ended."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait

import msgspec

from minisgl.errors import EngineDead, MiniSGLError
from minisgl.messages.child import Failed, Ready, Report
from minisgl.messages.options import ChildOptions

decode = msgspec.json.Decoder[Report](Report).decode

GRACE = 5.0
"""Seconds that processes have to end by themselves."""


class ChildProcess:
    """``python -m MODULE``, see `minisgl.messages.child`.

    A new interpreter, not a fork and not ``multiprocessing``: notebooks and scripts without a main guard can start it.
    It has a process group of its own, so that Ctrl-C in a terminal reaches the parent alone, which ends the children
    when it is time. On Linux it dies with the *thread* that has started it: start it from one that lives on.

    Args:
        module: its main module.
        options: what it is told.
    """

    def __init__(self, module: str, options: ChildOptions) -> None:
        self.name = options.name
        self.ready: Future[Ready] = Future()
        """Set when the child is at work. If it dies before: its own error, or `EngineDead`."""
        self.exited: Future[MiniSGLError] = Future()
        """Set when the child has ended, whenever and however that happens: what is known of why."""
        command = [sys.executable, "-m", module]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead already, which the watch will notice
            self._process.stdin.write(msgspec.json.encode(options) + b"\n")
            self._process.stdin.flush()
        threading.Thread(target=self._watch, name=f"watch-{self.name}", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def terminate(self) -> None:
        """Ask the child to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the child."""
        self._process.kill()

    def _watch(self) -> None:
        """Wait for reports and then for the end, blocked in the kernel: news comes at once, and costs nothing."""
        failed = self._read_reports()
        error = explain(self.name, self._process.wait(), failed)
        self._close_pipes()
        if not self.ready.done():
            self.ready.set_exception(failed.failure.error() if failed else error)
        self.exited.set_result(error)

    def _close_pipes(self) -> None:
        """A server that starts lost processes anew must not keep two files of each."""
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # the child died before it had read its options
                pipe.close()

    def _read_reports(self) -> Failed | None:
        """All reports until the child closes its end; returns its last words, if they were no good ones."""
        failed = None
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                report = decode(line)
            except msgspec.MsgspecError:  # a library printed this before the child took over its standard output
                sys.stderr.buffer.write(line)
                continue
            if isinstance(report, Ready):
                self.ready.set_result(report)
            else:
                failed = report
        return failed


def explain(name: str, code: int, failed: Failed | None) -> EngineDead:
    """What is known of why a child has ended.

    Args:
        name: of the process.
        code: its exit code; minus the number of the signal that has killed it.
        failed: its last words, if it had any.
    """
    if failed is not None:
        return EngineDead(f"the {name} process died: {failed.failure.message}")
    if code < 0:
        return EngineDead(f"the {name} process was killed by {signal.Signals(-code).name}")
    return EngineDead(f"the {name} process ended with exit code {code}")


def wait_until_ready(children: Sequence[ChildProcess], timeout: float) -> None:
    """Wait for all, or for the first that cannot get ready.

    Raises:
        MiniSGLError: the error that kept a child from getting ready.
        EngineDead: a child died, or was not ready after ``timeout`` seconds.
    """
    done, late = wait([child.ready for child in children], timeout, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if late:
        names = ", ".join(child.name for child in children if child.ready in late)
        raise EngineDead(f"not ready within {timeout:g} s: {names}; look at the log, or raise start_timeout")


def end(children: Sequence[ChildProcess]) -> None:
    """Have all children end, by force if need be, and wait until they have."""
    for child in children:
        child.terminate()
    exited = [child.exited for child in children]
    _, stubborn = wait(exited, GRACE)
    for child in children:
        if child.exited in stubborn:
            child.kill()
    wait(exited, GRACE)
