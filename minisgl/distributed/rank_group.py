"""The processes of the ranks: if one of them is lost, all end together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future, wait
from functools import partial

from minisgl.distributed.messages import RankOptions
from minisgl.distributed.rendezvous import loopback
from minisgl.errors import EngineDead
from minisgl.processes import ChildProcess, join_threads

_GRACE = 0.1
"""Seconds in which other ranks may be found to have ended as well, before it is decided which one began."""
_ANSWER = 2.0
"""Seconds in which a rank that is not stopped answers."""
_PATIENCE = 10.0
"""Seconds that killed processes may take to disappear."""


class RankGroup:
    """Child processes that live and die together.

    If a rank is lost (`ChildProcess` says when it is), a thread kills the others: nothing is left on a GPU, and no rank
    waits for a collective that will never be complete.
    """

    def __init__(self) -> None:
        self.end: str | None = None
        """Why the ranks are gone."""
        self.children: list[ChildProcess] = []
        self.alarm, self._bell = os.pipe()
        self._news: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        """Ranks that have ended, and reasons to end all of them."""
        self._watch: threading.Thread | None = None
        self._closed = False

    def start(self, options: Sequence[RankOptions], store: object) -> None:
        """Start a process for each, in the order of the ranks.

        Args:
            options: of the ranks.
            store: where they meet. It is kept open as long as they live, and no longer.

        Raises:
            OSError, RuntimeError: a process or thread cannot be started. `close` ends the others.
        """
        watch = threading.Thread(target=self._run, args=(store,), name="minisgl-ranks", daemon=True)
        watch.start()
        self._watch = watch
        for each in options:
            child = _start(each)
            self.children.append(child)
            child.exited.add_done_callback(partial(self._hear_of_exit, each.rank))

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
            join_threads([self._watch], patience)
            self._news.put(reason)
            join_threads([self._watch], _PATIENCE)
        self.end = self.end or reason
        return EngineDead(self.end)

    def close(self) -> None:
        """Kill all ranks and wait until they are gone. May be called twice."""
        self.fail("the engine was closed")
        wait([child.exited for child in self.children], _PATIENCE)
        if not self._closed:
            self._closed = True
            os.close(self.alarm)
            if self._watch is None:
                os.close(self._bell)

    def _hear_of_exit(self, rank: int, exited: Future[EngineDead]) -> None:
        self._news.put(rank)

    # -- in a thread ---------------------------------------------------------------------------------------------------

    def _run(self, store: object) -> None:
        first = self._news.get()
        self.end = first if isinstance(first, str) else self._verdict(first)
        for child in self.children:
            child.kill()
        os.close(self._bell)  # whoever waits for a rank sees that the other end of this pipe is closed

    def _verdict(self, first: int) -> str:
        """Which rank is to blame, and what is known of why.

        A rank that is lost takes others along, whose connections break or whose collectives time out. So the first to
        end may be a victim. To blame is one that stands still, then one that was killed, and only then the first.
        """
        ended = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(rank := self._news.get(timeout=_GRACE), int):
                ended.append(rank)
        children = [self.children[rank] for rank in ended]
        for child in children:
            if child.stands_still or child.exit_code == -signal.SIGKILL:
                return str(child.exited.result())
        blamed = next((child for child in children if (child.exit_code or 0) < 0), children[0])
        error, stopped = str(blamed.exited.result()), self._stopped()
        return error if stopped is None else f"{stopped} does not answer; it is stopped or hangs ({error})"

    def _stopped(self) -> str | None:
        """The first rank that lives and is at work, and does not answer."""
        at_work = [child for child in self.children if child.ready.done() and not child.exited.done()]
        silent = [child for child in at_work if not child.answers(_ANSWER)]
        return next((child.title for child in silent if not child.exited.done()), None)


def _start(options: RankOptions) -> ChildProcess:
    """No port of a rank is open to other machines. Ranks that wait for each other have collectives with a timeout and
    a driver with another one, so they have both before they are taken for ranks that hang."""
    config, interface = options.config, loopback()
    local = {} if interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return ChildProcess(
        "minisgl.distributed.worker",
        options,
        title=f"rank {options.rank}",
        hang_timeout=config.hang_timeout,
        turn_timeout=config.distributed_timeout + (config.hang_timeout or 0.0),
        environment={**local, "OMP_NUM_THREADS": str(options.threads)},
        pass_fds=(options.reports, *options.endpoint.fds),
        prefix=f"[rank {options.rank}] ",
    )
