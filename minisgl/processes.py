"""Child processes, seen from their parent: ranks and the server's workers are started, watched and ended here.

A child is lost when it has died, and when it hangs: it is stopped (SIGSTOP, a debugger) or makes no progress.
`ChildProcess` notices both, kills a child that hangs, and tells why it ended.
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

from minisgl.child_process import BEAT, HERE, ChildOptions, ChildReport, Failed, Ready
from minisgl.errors import EngineDead

_decode_report = msgspec.json.Decoder[ChildReport](ChildReport).decode

GRACE = 5.0  # seconds that processes have to end after SIGTERM
_DRAIN = 1.0  # seconds to read on after a child has ended; processes that it has started may keep its output open


class ChildProcess:
    """``python -m MODULE`` as a child, whose side of the protocol is `minisgl.child_process`.

    A new interpreter, so that notebooks and scripts without a main guard can start it, in its own session: Ctrl-C in a
    terminal reaches only the parent, and processes that the child has started are ended with it.

    Args:
        title: its name in errors; None is "the NAME process".
        hang_timeout: seconds without an answer after which a child that was ready is killed; None never does.
        turn_timeout: seconds without a heartbeat of its main loop after which it is killed even if it answers; must
            exceed the longest turn. None is ``hang_timeout``.
        environment: defaults of environment variables.
        prefix: before each line that it writes to stderr, which this process then passes on; None leaves stderr alone.

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
        self.ready: Future[Ready] = Future()  # if the child dies before: its own error, or EngineDead
        self.exited: Future[EngineDead] = Future()  # why the child has ended, set once it has
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
        """Minus the number of the signal that killed it; None while the child lives."""
        return self._process.returncode

    @property
    def hung(self) -> bool:
        """Whether it was killed because it made no progress."""
        return self._hung is not None

    def terminate(self) -> None:
        """Ask the child to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the child, even if it is stopped."""
        self._process.kill()

    def answers(self, timeout: float) -> bool:
        """Whether the child answers a ping within ``timeout`` seconds."""
        with self._pinging:
            self._ping()
            number = self._pings
            return self._pinging.wait_for(lambda: self._answers >= number, timeout)

    # -- in the thread that starts the child and waits for its end -----------------------------------------------------

    def _watch(
        self, command: list[str], options: ChildOptions, popen: dict[str, Any], started: Future[subprocess.Popen[bytes]]
    ) -> None:
        # This thread lives as long as the child, because Linux kills the child with the thread that has started it.
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
        join_threads(readers, _DRAIN)
        with contextlib.suppress(OSError):  # it did not read its options, the rest of which would be written now
            process.stdin.close()
        reason = self._hung or exit_error(self.title, code, self._failed, self._last_line)
        if not self.ready.done():
            self.ready.set_exception(self._failed.failure.error() if self._failed else reason)
        self.exited.set_result(reason)

    def _start(self, command: list[str], options: ChildOptions, popen: dict[str, Any]) -> list[threading.Thread]:
        """Start the child, send it its options, and return the threads that read its output."""
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

    # -- in the thread that reads its reports and answers --------------------------------------------------------------

    def _read_reports(self, stdout: IO[bytes]) -> None:
        with stdout:
            for line in self._lines(stdout.fileno()):
                if line not in (BEAT, HERE):
                    self._take_report(line)

    def _take_report(self, line: bytes) -> None:
        try:
            report = _decode_report(line)
        except msgspec.MsgspecError:  # a library printed this before the child took over its standard output
            self._pass_on(line)
            return
        if isinstance(report, Failed):
            self._failed = report
        elif not self.ready.done():
            self.ready.set_result(report)

    def _lines(self, fd: int) -> Iterator[bytes]:
        """Lines until the child closes its end, or is killed because it hangs; only time with an empty pipe counts."""
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

    # -- its other output ----------------------------------------------------------------------------------------------

    def _read_output(self, stderr: IO[bytes]) -> None:
        with stderr:
            for line in stderr:
                self._pass_on(line)

    def _pass_on(self, line: bytes) -> None:
        text = line.decode(errors="replace").rstrip()
        if text and self._prefix is not None:
            self._last_line = text
        print(f"{self._prefix or ''}{text}", file=sys.stderr)


def exit_error(title: str, code: int, failed: Failed | None, last_line: str = "") -> EngineDead:
    """Describe why a child has ended, from its exit code, its report of an error and the last line of its output."""
    if failed is not None:
        return EngineDead(f"{title} died: {failed.failure.message}")
    if code < 0:
        return EngineDead(f"{title} was killed by {_signal_name(-code)}")
    return EngineDead(f"{title} ended with exit code {code}" + (f": {last_line}" if last_line else ""))


def wait_until_ready(children: Sequence[ChildProcess], timeout: float) -> None:
    """Wait until all children are ready, or raise the error of the first that fails.

    Raises `EngineDead` if a child died, or was not ready after ``timeout`` seconds.
    """
    done, late = wait([child.ready for child in children], timeout, FIRST_EXCEPTION)
    for future in done:
        future.result()
    if late:
        names = ", ".join(child.name for child in children if child.ready in late)
        raise EngineDead(f"not ready within {timeout:g} s: {names}; look at the log, or raise start_timeout")


def end_processes(children: Sequence[ChildProcess]) -> None:
    """Terminate all children, kill those that are still alive after `GRACE` seconds, and wait for their ends."""
    for child in children:
        child.terminate()
    exited = [child.exited for child in children]
    _, stubborn = wait(exited, GRACE)
    for child in children:
        if child.exited in stubborn:
            child.kill()
    wait(exited, GRACE)


def join_threads(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Wait ``timeout`` seconds for all threads together, except the calling one."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _run_thread(name: str, job: Any, *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=job, args=arguments, name=f"minisgl-{name}", daemon=True)
    thread.start()
    return thread


def _module_path() -> str:
    # A child finds modules where this process finds them.
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no names
        return f"signal {number}"
