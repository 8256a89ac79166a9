"""Child processes, seen from their parent: started, watched and ended, for ranks and for the server's workers alike.

A child is lost when it has died, and also when it stands still: it is stopped (SIGSTOP, a debugger), or its main loop
hangs. `ChildProcess` notices both, kills what stands still, and says which process it was and what is known of why.
What that means for the others is decided by `minisgl.distributed.remote_executor` and `minisgl.server.process_engine`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import IO, Any

import msgspec

from minisgl.child_process import BEAT, HERE, ChildOptions, Failed, Ready, Report
from minisgl.errors import EngineDead

decode = msgspec.json.Decoder[Report](Report).decode

GRACE = 5.0
"""Seconds that processes have to end by themselves."""
_LAST_WORDS = 1.0
"""Seconds to read on after a child has ended. Its output has no end as long as a process that it has started lives."""


class ChildProcess:
    """``python -m MODULE``, whose other side is `minisgl.child_process`.

    A new interpreter, not a fork and not ``multiprocessing``: notebooks and scripts without a main guard can start it.
    It has a session of its own, so that Ctrl-C in a terminal reaches the parent alone, which ends the children when it
    is time; and what the child has started, such as a compiler, ends with it.

    Args:
        module: its main module.
        options: what it is told.
        title: how errors call it; None is "the NAME process".
        hang_timeout: seconds without a sign of life after which a child that was ready is killed; None never does.
        turn_timeout: seconds without a heartbeat after which it is killed even if it answers, because its main loop
            hangs: more than the longest turn takes. None is ``hang_timeout``.
        environment: variables that it gets where this process has none of that name.
        pass_fds: open files that it inherits.
        prefix: what its lines begin with when they are passed on to this process's stderr; None lets it write there
            itself.

    Raises:
        OSError, RuntimeError: the system does not allow for the process or its threads.
    """

    def __init__(
        self,
        module: str,
        options: ChildOptions,
        *,
        title: str | None = None,
        hang_timeout: float | None = None,
        turn_timeout: float | None = None,
        environment: Mapping[str, str] | None = None,
        pass_fds: Sequence[int] = (),
        prefix: str | None = None,
    ) -> None:
        self.name = options.name
        self.title = f"the {options.name} process" if title is None else title
        self.ready: Future[Ready] = Future()
        """Set when the child is at work. If it dies before: its own error, or `EngineDead`."""
        self.exited: Future[EngineDead] = Future()
        """Set when the child has ended, whenever and however that happens: what is known of why."""
        self._hang_timeout = hang_timeout
        self._turn_timeout = hang_timeout if turn_timeout is None else turn_timeout
        self._prefix = prefix
        self._last_line = ""
        self._failed: Failed | None = None
        self._hung: EngineDead | None = None
        self._pinging = threading.Condition()
        self._pings = self._answers = 0
        popen: dict[str, Any] = {
            "stderr": None if prefix is None else subprocess.PIPE,
            "env": {**(environment or {}), **os.environ, "PYTHONPATH": _module_path()},
            "pass_fds": pass_fds,
        }
        started: Future[subprocess.Popen[bytes]] = Future()
        _run_thread(f"watch-{self.name}", self._watch, [sys.executable, "-m", module], options, popen, started)
        self._process = started.result()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """As `subprocess.Popen.returncode`; None while the child lives."""
        return self._process.returncode

    @property
    def stands_still(self) -> bool:
        """Whether it was killed because it stood still."""
        return self._hung is not None

    def terminate(self) -> None:
        """Ask the child to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the child, even if it is stopped."""
        self._process.kill()

    def answers(self, timeout: float) -> bool:
        """Whether the child answers a ping within ``timeout`` seconds. One that is stopped does not."""
        with self._pinging:
            self._ping()
            number = self._pings
            return self._pinging.wait_for(lambda: self._answers >= number, timeout)

    # -- in the thread that starts the child and waits for its end -----------------------------------------------------

    def _watch(
        self, command: list[str], options: ChildOptions, popen: dict[str, Any], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        """Start the child and sleep until it ends. The thread lives as long as the child because on Linux the child is
        killed with the thread that has started it."""
        try:
            readers = self._start(command, options, popen)
        except BaseException as error:
            started.set_exception(error)
            return
        process = self._process
        assert process.stdin is not None
        started.set_result(process)
        code = process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the latter on macOS, where zombies are left
            os.killpg(process.pid, signal.SIGKILL)
        join_threads(readers, _LAST_WORDS)
        with contextlib.suppress(OSError):  # it did not read its options, the rest of which would be written now
            process.stdin.close()
        reason = self._hung or explain(self.title, code, self._failed, self._last_line)
        if not self.ready.done():
            self.ready.set_exception(self._failed.failure.error() if self._failed else reason)
        self.exited.set_result(reason)

    def _start(self, command: list[str], options: ChildOptions, popen: dict[str, Any]) -> list[threading.Thread]:
        """Start the child, tell it its options, and return the threads that read what it says."""
        process = self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, **popen
        )
        assert process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended already, which `_watch` notices
                process.stdin.write(msgspec.json.encode(options) + b"\n")
                process.stdin.flush()
            readers = [_run_thread(f"reports-{self.name}", self._read_reports, process.stdout)]
            if process.stderr is not None:
                readers.append(_run_thread(f"output-{self.name}", self._read_output, process.stderr))
        except BaseException:
            process.kill()
            raise
        return readers

    # -- in the thread that reads its reports --------------------------------------------------------------------------

    def _read_reports(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in self._lines(stdout.fileno()):
                if line not in (BEAT, HERE):
                    self._take_report(line)

    def _take_report(self, line: bytes) -> None:
        try:
            report = decode(line)
        except msgspec.MsgspecError:  # a library printed this before the child took over its standard output
            self._pass_on(line)
            return
        if isinstance(report, Failed):
            self._failed = report
        elif not self.ready.done():
            self.ready.set_result(report)

    def _lines(self, fd: int) -> Iterator[bytes]:
        """All lines until the child closes its end, or is killed because it stands still.

        Time counts only while the pipe is empty: what has come while this process stood still itself is read first.
        """
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        rest, pinged, turned = b"", False, time.monotonic()
        while True:
            watched = self._hang_timeout is not None and self.ready.done()
            if poll.poll(500 * self._hang_timeout if watched and self._hang_timeout is not None else None):
                chunk = os.read(fd, 1 << 16)
                if not chunk:
                    return
                pinged = False
                *lines, rest = (rest + chunk).split(b"\n")
                self._count_answers(lines.count(HERE))
                if any(line != HERE for line in lines):
                    turned = time.monotonic()
                yield from lines
            elif pinged:
                self._kill_hung(f"has not answered for {self._hang_timeout:g} s; it is stopped or hangs")
            else:
                pinged = True
                self._ping()
            if watched and self._turn_timeout is not None and time.monotonic() - turned >= self._turn_timeout:
                self._kill_hung(f"has made no progress for {self._turn_timeout:g} s; its main loop hangs")

    def _ping(self) -> None:
        assert self._process.stdin is not None
        with self._pinging, contextlib.suppress(OSError, ValueError):  # it has ended
            self._pings += 1
            os.write(self._process.stdin.fileno(), b"\n")

    def _count_answers(self, number: int) -> None:
        with self._pinging:
            self._answers += number
            self._pinging.notify_all()

    def _kill_hung(self, what: str) -> None:
        if self._hung is None and self._process.returncode is None:
            self._hung = EngineDead(f"{self.title} {what}")
            self.kill()

    # -- what it says beside its reports -------------------------------------------------------------------------------

    def _read_output(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text and self._prefix is not None:
            self._last_line = text
        print(f"{self._prefix or ''}{text}", file=sys.stderr)


def explain(title: str, code: int, failed: Failed | None, last_line: str = "") -> EngineDead:
    """What is known of why a child has ended.

    Args:
        title: what to call it, such as "the scheduler process".
        code: its exit code; minus the number of the signal that has killed it.
        failed: its report of an error, if there was one.
        last_line: of its output, where that is known.
    """
    if failed is not None:
        return EngineDead(f"{title} died: {failed.failure.message}")
    if code < 0:
        return EngineDead(f"{title} was killed by {_signal_name(-code)}")
    return EngineDead(f"{title} ended with exit code {code}" + (f": {last_line}" if last_line else ""))


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


def join_threads(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Wait so many seconds for all of them together, but never for the thread that calls this."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _run_thread(name: str, job: Any, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=job, args=arguments, name=f"minisgl-{name}", daemon=True)
    thread.start()
    return thread


def _module_path() -> str:
    """Of a child: modules are found where this process finds them."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no names
        return f"signal {number}"
