"""``python -m minisgl.bench faults``: kill one process of a server under load, and see who hears of it, and when."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
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
_EXIT_TIMEOUT = 30.0
"""Seconds that the server has to end, or to be healthy again."""
_SWEEP_TIMEOUT = 5.0
"""Seconds that its other processes have to follow it."""
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
        records: of the requests that were in flight.
        told: seconds from the kill until the last of their clients knew.
        server: its exit code in words, or whether it serves again.
        noticed: whether its operator can tell: it has ended with an error, or it serves again.
        left: what it left behind, in words: processes, shared memory, temporary files.
    """

    kinds: tuple[str, ...]
    kind: str
    records: Sequence[Record]
    told: float
    server: str
    noticed: bool
    left: list[str]


def run_faults(subject: Subject, load: FaultLoad) -> Report:
    """Start a server for each kind of process that it has, load it, and kill one process of that kind with SIGKILL.

    Args:
        subject: the server; one that runs already is left in peace.
        load: what is in flight.

    Raises:
        ServerFailed: a server does not start, or answers no stream.
    """
    first = _kill(subject, load, None)
    aftermaths = [*(_kill(subject, load, kind) for kind in first.kinds[1:]), first]
    settings = {"model": subject.model, "options": dict(subject.options), **asdict(load)}
    return Report("faults", settings, [_requests(aftermaths), _servers(aftermaths)], _targets(aftermaths))


def _kill(subject: Subject, load: FaultLoad, kind: str | None) -> Aftermath:
    """One server, one kill: of its first process of that kind, or of the process that was started first."""
    shared = _entries(_SHARED_MEMORY)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = served_model(subject.model, root)
        options = {**model.options, **subject.options}
        with server(model.path, model.vocab_size, options, root, subject.start_timeout) as running:
            tree = ProcessTree(running.process.pid)
            kinds = tuple(dict.fromkeys(tree.kinds.values()))
            victim = next(process for process, its_kind in tree.kinds.items() if kind in (None, its_kind))
            records, killed_at = asyncio.run(_load_and_kill(running, load, victim))
            told = max(record.ended for record in records) - killed_at
            state, noticed = _wait_for_the_end(running)
        left = _left_processes(tree) + [f"/dev/shm/{entry}" for entry in sorted(_entries(_SHARED_MEMORY) - shared)]
        left += sorted(f"TMPDIR/{entry}" for entry in _entries(running.directory))
    return Aftermath(kinds, kind or kinds[0], records, told, state, noticed, left)


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
    try:
        code = running.process.wait(_EXIT_TIMEOUT)
    except subprocess.TimeoutExpired:
        records = asyncio.run(closed_loop(Client(running.target, seed=1, timeout=5.0), [Planned(0, 8, 1)], 1))
        serves = records[0].outcome is Outcome.FINISHED
        return ("serves again" if serves else "runs and does not answer"), serves
    if code < 0:
        return f"killed by {signal.Signals(-code).name}", True
    return f"exit code {code}", code != 0


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
        [each.kind, len(each.records), *(count[outcome] for outcome in seen), each.told]
        for each, count in zip(aftermaths, counts, strict=True)
    ]
    columns = ["killed", "in flight", *seen, "until the last one knew, s"]
    return Table("what happened to the requests in flight", columns, rows)


def _servers(aftermaths: Sequence[Aftermath]) -> Table:
    rows: list[list[Cell]] = [[each.kind, each.server, ", ".join(each.left) or "nothing"] for each in aftermaths]
    return Table("what happened to the server", ["killed", "server", "left behind"], rows)


def _targets(aftermaths: Sequence[Aftermath]) -> list[Target]:
    """Clients of a process that is gone itself cannot be told by it; all others must hear the reason."""
    targets: list[Target] = []
    for each in aftermaths:
        told = sum(record.outcome in _TOLD for record in each.records) / len(each.records)
        if each.kind != each.kinds[0]:
            targets.append(Target(f"{each.kind}: requests with an answer, share", told, 1.0, at_least=True))
        targets.append(Target(f"{each.kind}: until the last one knew, s", each.told, 1.0, at_least=False))
        sound = float(each.noticed and not each.left)
        targets.append(Target(f"{each.kind}: ended with an error, and left nothing", sound, 1.0, at_least=True))
    return targets
