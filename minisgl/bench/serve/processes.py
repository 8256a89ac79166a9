"""The server's processes as the operating system shows them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import psutil

_PACKAGE = "minisgl."


def kind_of(process: psutil.Process) -> str | None:
    """What a process is, by the module of ours that it runs: ``minisgl.serve`` is ``serve``, and
    ``minisgl.server.scheduler_worker`` is ``scheduler``. None for what libraries start for themselves.
    """
    try:
        words: list[str] = process.cmdline()
    except psutil.Error:
        return None
    for flag, module in itertools.pairwise(words):
        if flag == "-m" and module.startswith(_PACKAGE):
            return module.removeprefix(_PACKAGE).removesuffix("worker").rstrip("._").rpartition(".")[2]
    return None


class ProcessTree:
    """A server's process and all that it has started, at the time when this is made.

    Args:
        pid: of the first.
    """

    def __init__(self, pid: int) -> None:
        root = psutil.Process(pid)
        self.kinds: dict[psutil.Process, str] = {}
        """Those of ours, with what they are; the first one comes first."""
        for process in (root, *root.children(recursive=True)):
            kind = kind_of(process)
            if kind is not None:
                self.kinds[process] = kind

    def __or__(self, later: ProcessTree) -> ProcessTree:
        """The processes of both: of a server that has started some of its own anew in between."""
        both = ProcessTree.__new__(ProcessTree)
        both.kinds = self.kinds | later.kinds
        return both

    def alive(self) -> list[psutil.Process]:
        """Those that still run; a process that has ended and was not collected does not."""
        return [process for process in self.kinds if _runs(process)]

    def resident(self) -> dict[str, int]:
        """Bytes of memory by kind. Pages that processes share are counted for each."""
        return self._sum(lambda process: process.memory_info().rss)

    def descriptors(self) -> dict[str, int]:
        """Open files, sockets included, by kind."""
        return self._sum(lambda process: process.num_fds())

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time by kind; the first process's main thread, where the event loop runs, apart from its others."""
        used: dict[str, float] = {}
        for number, (process, kind) in enumerate(self.kinds.items()):
            with contextlib.suppress(psutil.Error):
                for name, seconds in _threads(process) if number == 0 else _whole(process):
                    used[kind + name] = used.get(kind + name, 0.0) + seconds
        return used

    def _sum(self, measure: Callable[[psutil.Process], int]) -> dict[str, int]:
        total: dict[str, int] = {}
        for process, kind in self.kinds.items():
            with contextlib.suppress(psutil.Error):  # it has ended, and has nothing any more
                total[kind] = total.get(kind, 0) + measure(process)
        return total


def _runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _threads(process: psutil.Process) -> Iterator[tuple[str, float]]:
    for thread in process.threads():
        name = ", event loop" if thread.id == process.pid else ", other threads"
        yield name, thread.user_time + thread.system_time


def _whole(process: psutil.Process) -> Iterator[tuple[str, float]]:
    times = process.cpu_times()
    yield "", times.user + times.system
