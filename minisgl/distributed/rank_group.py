"""The processes of the ranks: started together, watched, and ended together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from minisgl.distributed.messages import Setup
from minisgl.distributed.rendezvous import loopback
from minisgl.errors import EngineDead

_GRACE = 0.1
"""Seconds in which other ranks may be found to have ended as well, before it is decided which one began."""
_PATIENCE = 10.0
"""Seconds that killed processes may take to disappear."""
_LAST_WORDS = 1.0
"""Seconds to wait for the output of ranks that have ended. It has no end if a process outside their groups has it."""


class RankGroup:
    """Child processes that live and die together.

    One thread starts them and stays, since Linux ends a child with the thread that has started it. If a rank ends, for
    whatever reason, that thread kills the others: nothing is left on a GPU, and nobody waits for a collective that will
    never be complete. What a rank has started, such as a compiler, ends with it.
    """

    def __init__(self) -> None:
        self.end: str | None = None
        """Why the ranks are gone."""
        self.processes: list[subprocess.Popen[bytes]] = []
        self.alarm, self._bell = os.pipe()
        self._news: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        """Ranks that have ended, and reasons to end all of them."""
        self._last_words: dict[int, str] = {}
        self._watch: threading.Thread | None = None
        self._exits: list[threading.Thread] = []
        self._outputs: list[threading.Thread] = []
        self._closed = False

    def start(self, setups: Sequence[Setup], store: object) -> None:
        """Start a process for each, in the order of the ranks.

        Args:
            setups: of the ranks.
            store: where they meet. It is kept open as long as they live, and no longer.

        Raises:
            OSError, RuntimeError: a process or thread cannot be started. `close` ends the others.
        """
        started: Future[None] = Future()
        self._watch = _run_thread("ranks", self._run, setups, started, store)
        started.result()

    def check(self) -> None:
        """Raise `EngineDead` if the ranks are gone."""
        if self.end is not None:
            raise EngineDead(self.end)

    def fail(self, reason: str, patience: float = 0.0) -> EngineDead:
        """Kill all ranks.

        Args:
            reason: what `check` says from now on, unless a rank is found to have ended by itself.
            patience: seconds to wait for just that.
        """
        if self._watch is not None:
            _join([self._watch], patience)
            self._news.put(reason)
            _join([self._watch], _PATIENCE)
        self.end = self.end or reason
        return EngineDead(self.end)

    def close(self) -> None:
        """Kill all ranks and wait until they are gone. May be called twice."""
        self.fail("the engine was closed")
        _join(self._exits, _PATIENCE)
        _join(self._outputs, _LAST_WORDS)
        if not self._closed:
            self._closed = True
            os.close(self.alarm)
            if self._watch is None:
                os.close(self._bell)

    # -- in the thread that starts and watches them --------------------------------------------------------------------

    def _run(self, setups: Sequence[Setup], started: Future[None], store: object) -> None:
        try:
            for setup in setups:
                self._start(setup)
        except Exception as error:
            started.set_exception(error)
        else:
            started.set_result(None)
            first = self._news.get()
            self.end = first if isinstance(first, str) else self._verdict(first)
        finally:
            for process in self.processes:
                process.kill()
            os.close(self._bell)  # whoever waits for a rank sees that the other end of this pipe is closed

    def _start(self, setup: Setup) -> None:
        process = subprocess.Popen(
            [sys.executable, "-m", "minisgl.distributed.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(setup.reports, *setup.endpoint.fds),
            env=_environment(setup),
            start_new_session=True,  # Ctrl-C in a terminal is for the driver alone
        )
        self.processes.append(process)
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended already, which is noticed elsewhere
            process.stdin.write(msgspec.json.encode(setup) + b"\n")
            process.stdin.flush()
        self._outputs.append(_run_thread(f"rank-{setup.rank}-output", self._pass_on_output, setup.rank, process))
        self._exits.append(_run_thread(f"rank-{setup.rank}-exit", self._wait_for_exit, setup.rank, process))

    def _verdict(self, first: int) -> str:
        """Which rank has ended and how. A rank that was killed takes others along, whose connections break: of several
        that have ended, the killed one is to blame."""
        ended = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(rank := self._news.get(timeout=_GRACE), int):
                ended.append(rank)
        codes = {rank: self.processes[rank].returncode for rank in ended}
        blamed = next((rank for rank in ended if codes[rank] < 0), first)
        if codes[blamed] < 0:
            return f"rank {blamed} was killed by {_signal_name(-codes[blamed])}"
        _join([self._outputs[blamed]], _LAST_WORDS)
        return f"rank {blamed} ended with exit code {codes[blamed]}: {self._last_words.get(blamed, 'it said nothing')}"

    # -- in threads of their own, two for each rank --------------------------------------------------------------------

    def _pass_on_output(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        with process.stdout as output:
            for line in output:
                text = line.decode(errors="replace").rstrip()
                if text:
                    self._last_words[rank] = text
                print(f"[rank {rank}] {text}", file=sys.stderr)

    def _wait_for_exit(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        with contextlib.suppress(ProcessLookupError):  # it has left no compiler or other child behind
            os.killpg(process.pid, signal.SIGKILL)
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it did not read its setup, the rest of which would be written now
            process.stdin.close()
        self._news.put(rank)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # one of those that have no names
        return f"signal {number}"


def _run_thread(name: str, job: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=job, args=arguments, name=f"minisgl-{name}", daemon=True)
    thread.start()
    return thread


def _join(threads: Sequence[threading.Thread], timeout: float) -> None:
    """Wait so many seconds for all of them together, except for the one that waits: a group may be collected as garbage
    in any."""
    deadline = time.monotonic() + timeout
    for thread in threads:
        if thread is not threading.current_thread():
            thread.join(max(0.0, deadline - time.monotonic()))


def _environment(setup: Setup) -> dict[str, str]:
    """Of a rank: modules are found where the driver finds them, and no port is open to other machines."""
    here = {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    interface = loopback()
    local = {} if interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return {**local, "OMP_NUM_THREADS": str(setup.threads), **os.environ, **here}
