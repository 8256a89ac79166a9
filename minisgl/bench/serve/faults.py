"""``python -m minisgl.bench faults``: kill one process of a server under load, and see who hears of it, and when.

Each kind of process is killed twice: once in a server that ends when it loses a process, and once in a server that was
started with ``--restart``.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.serve.client import Client
from minisgl.bench.serve.errors import ServerFailed
from minisgl.bench.serve.loops import closed_loop
from minisgl.bench.serve.models import served_model
from minisgl.bench.serve.processes import ProcessTree
from minisgl.bench.serve.records import Outcome, Record
from minisgl.bench.serve.run import Subject
from minisgl.bench.serve.server import RunningServer, server
from minisgl.bench.serve.workload import Planned

_LOADED_TIMEOUT = 60.0
"""Seconds that all streams have to begin."""
_ANSWER_TIMEOUT = 60.0
"""Seconds that a request has to end."""
_END_TIMEOUT = 60.0
"""Seconds that the server has to end, or to serve again."""
_PROBE_TIMEOUT = 5.0
"""Seconds that a request has which asks whether it does."""
_SWEEP_TIMEOUT = 5.0
"""Seconds that its other processes have to follow it, and its sockets to close."""
_SHARED_MEMORY = Path("/dev/shm")
_TOLD = (Outcome.FINISHED, Outcome.REFUSED, Outcome.FAILED)


@dataclass(frozen=True, slots=True)
class FaultLoad:
    """What is in flight when a process is killed.

    Args:
        users: requests; every fourth waits for a whole answer, the others read a stream.
        output_len: tokens that each asks for; enough to be killed before the end.
        input_len: tokens of each prompt.
    """

    users: int = 32
    output_len: int = 1000
    input_len: int = 16

    def plan(self) -> list[Planned]:
        """The requests."""
        return [Planned(index, self.input_len, self.output_len, stream=index % 4 != 3) for index in range(self.users)]


@dataclass(frozen=True, slots=True)
class Aftermath:
    """What one kill led to.

    Args:
        kinds: of all processes that the server had.
        kind: of the one that was killed.
        restart: whether the server had been told to start lost processes anew.
        records: of the requests that were in flight.
        told: seconds from the kill until the last client knew whose request it cost; None if it cost none.
        server: its exit code in words, or whether it serves again.
        seconds: from when all clients knew until then.
        noticed: whether its operator can tell: it has ended with an error, or it serves again.
        left: what it left behind, in words: processes, open files, shared memory, temporary files.
    """

    kinds: tuple[str, ...]
    kind: str
    restart: bool
    records: Sequence[Record]
    told: float | None
    server: str
    seconds: float
    noticed: bool
    left: list[str]

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.kind}, --restart" if self.restart else self.kind


def run_faults(subject: Subject, load: FaultLoad) -> Report:
    """Start two servers for each kind of process that they have, load them, and kill one such process with SIGKILL.

    Args:
        subject: the server; one that runs already is left in peace.
        load: what is in flight.

    Raises:
        ServerFailed: a server does not start, or answers no stream.
    """
    first = _kill(subject, load, None, restart=False)
    others = [_kill(subject, load, kind, restart=False) for kind in first.kinds[1:]]
    restarted = [_kill(subject, load, kind, restart=True) for kind in (*first.kinds[1:], first.kind)]
    aftermaths = [*others, first, *restarted]
    settings = {"model": subject.model, "options": dict(subject.options), **asdict(load)}
    return Report("faults", settings, [_requests(aftermaths), _servers(aftermaths)], _targets(aftermaths))


def _kill(subject: Subject, load: FaultLoad, kind: str | None, restart: bool) -> Aftermath:
    """One server, one kill: of its first process of that kind, or of the process that was started first."""
    shared = _entries(_SHARED_MEMORY)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = served_model(subject.model, root)
        options = {**model.options, **subject.options, "restart": restart}
        with server(model.path, model.vocab_size, options, root, subject.start_timeout) as running:
            tree = ProcessTree(running.process.pid)
            before = tree.descriptors()
            kinds = tuple(dict.fromkeys(tree.kinds.values()))
            victim = next(process for process, its_kind in tree.kinds.items() if kind in (None, its_kind))
            records, killed_at = asyncio.run(_load_and_kill(running, load, victim))
            begin = time.perf_counter()
            state, noticed = _wait_for_the_end(running)
            seconds = time.perf_counter() - begin
            if running.process.poll() is None:
                tree = tree | ProcessTree(running.process.pid)
            left = _left_files(tree, before)
        left += _left_processes(tree) + [f"/dev/shm/{entry}" for entry in sorted(_entries(_SHARED_MEMORY) - shared)]
        left += sorted(f"TMPDIR/{entry}" for entry in _entries(running.directory))
    cost = [record.ended - killed_at for record in records if record.outcome is not Outcome.FINISHED]
    told = max(cost, default=None)
    return Aftermath(kinds, kind or kinds[0], restart, records, told, state, seconds, noticed, left)


async def _load_and_kill(running: RunningServer, load: FaultLoad, victim: psutil.Process) -> tuple[list[Record], float]:
    client = Client(running.target, seed=0, timeout=_ANSWER_TIMEOUT)
    plan = load.plan()
    asking = asyncio.create_task(closed_loop(client, plan, load.users))
    deadline = time.monotonic() + _LOADED_TIMEOUT
    while client.streaming < sum(each.stream for each in plan):
        if asking.done() or time.monotonic() > deadline:
            asking.cancel()
            raise ServerFailed(f"not all of {load.users} requests were under way at the same time; raise --output-len")
        await asyncio.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    killed_at = time.perf_counter()
    return await asking, killed_at


def _wait_for_the_end(running: RunningServer) -> tuple[str, bool]:
    """What became of the server, in words, and whether that is an end that its operator can notice."""
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        try:
            code = running.process.wait(0.1)
        except subprocess.TimeoutExpired:
            if _serves(running):
                return "serves again", True
        else:
            return (f"killed by {signal.Signals(-code).name}", True) if code < 0 else (f"exit code {code}", code != 0)
    return "runs and does not answer", False


def _serves(running: RunningServer) -> bool:
    client = Client(running.target, seed=1, timeout=_PROBE_TIMEOUT)
    records = asyncio.run(closed_loop(client, [Planned(0, 8, 1)], 1))
    return records[0].outcome is Outcome.FINISHED


def _left_files(tree: ProcessTree, before: Mapping[str, int]) -> list[str]:
    """Kinds of processes that have more files open than before the load, once they had time to close them."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT
    while True:
        more = {kind: count - before[kind] for kind, count in tree.descriptors().items() if count > before[kind]}
        if not more or time.monotonic() > deadline:
            return [f"{count} open files of {kind}" for kind, count in more.items()]
        time.sleep(0.1)


def _left_processes(tree: ProcessTree) -> list[str]:
    """Kinds of the processes that have not ended in time. They are killed."""
    deadline = time.monotonic() + _SWEEP_TIMEOUT
    while tree.alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    left = tree.alive()
    for process in left:
        process.kill()
    return [f"process {tree.kinds[process]}" for process in left]


def _entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def _requests(aftermaths: Sequence[Aftermath]) -> Table:
    counts = [Counter(record.outcome for record in each.records) for each in aftermaths]
    seen = [outcome for outcome in Outcome if any(count[outcome] for count in counts)]
    rows: list[list[Cell]] = [
        [each.name, len(each.records), *(count[outcome] for outcome in seen), _or_none(each.told)]
        for each, count in zip(aftermaths, counts, strict=True)
    ]
    columns = ["killed", "in flight", *seen, "until the last one knew, s"]
    return Table("what happened to the requests in flight", columns, rows)


def _servers(aftermaths: Sequence[Aftermath]) -> Table:
    rows: list[list[Cell]] = [
        [each.name, each.server, each.seconds, ", ".join(each.left) or "nothing"] for each in aftermaths
    ]
    return Table("what happened to the server", ["killed", "server", "that took, s", "left behind"], rows)


def _or_none(seconds: float | None) -> Cell:
    return "–" if seconds is None else seconds


def _targets(aftermaths: Sequence[Aftermath]) -> list[Target]:
    """Clients of a process that is gone itself cannot be told by it; all others must hear the reason."""
    targets: list[Target] = []
    for each in aftermaths:
        told = sum(record.outcome in _TOLD for record in each.records) / len(each.records)
        if each.kind != each.kinds[0]:
            targets.append(Target(f"{each.name}: requests with an answer, share", told, 1.0, at_least=True))
        if each.told is not None:
            targets.append(Target(f"{each.name}: until the last one knew, s", each.told, 1.0, at_least=False))
        sound = float(each.noticed and not each.left)
        title = f"{each.name}: ended with an error or serves again, and left nothing"
        targets.append(Target(title, sound, 1.0, at_least=True))
    return targets
