"""``python -m minisgl.bench faults``: kill one process of a server under load, and see which clients learn of it.

Each kind of process is killed twice: once in a server that ends when it loses a process, and once with ``--restart``.
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from minisgl.bench.client import Client, Outcome, RequestRecord, closed_loop
from minisgl.bench.load import PlannedRequest
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.server import ProcessTree, RunningServer, ServerFailed, poll, served_model, server

_LOADED_TIMEOUT = 60.0  # seconds that all streams have to begin
_ANSWER_TIMEOUT = 60.0  # seconds that a request has to end
_END_TIMEOUT = 60.0  # seconds that the server has to end, or to serve again
_PROBE_TIMEOUT = 5.0  # seconds of the request that asks whether it does
_SWEEP_TIMEOUT = 5.0  # seconds that its other processes have to follow it, and its sockets to close
_INPUT_LEN = 16
_SHARED_MEMORY = Path("/dev/shm")
_TOLD = (Outcome.FINISHED, Outcome.REFUSED, Outcome.FAILED)


class KillResult(NamedTuple):
    """What one kill led to."""

    kinds: tuple[str, ...]  # of all processes that the server had
    kind: str  # of the one that was killed
    restart: bool  # whether the server had been told to start lost processes anew
    records: Sequence[RequestRecord]  # of the requests that were in flight
    told: float | None  # seconds from the kill until the last client knew whose request it cost; None if it cost none
    server: str  # its exit code in words, or whether it serves again
    seconds: float  # from when all clients knew until then
    noticed: bool  # whether its operator can tell: it has ended with an error, or it serves again
    left: list[str]  # what it left behind, in words: processes, open files, shared memory, temporary files

    @property
    def name(self) -> str:
        return f"{self.kind}, --restart" if self.restart else self.kind


def run_faults(
    model: str = "tiny",
    options: Mapping[str, Any] = {},
    start_timeout: float = 600.0,
    users: int = 32,
    output_len: int = 1000,
) -> Report:
    """Start two servers for each kind of process that they have, load them, and kill one such process with SIGKILL."""
    kill = partial(_kill, model, plan_of(users, output_len), start_timeout, options)
    first = kill(None, restart=False)
    others = [kill(kind, restart=False) for kind in first.kinds[1:]]
    restarted = [kill(kind, restart=True) for kind in (*first.kinds[1:], first.kind)]
    results = [*others, first, *restarted]
    return Report(
        "faults", {"input_len": _INPUT_LEN}, [request_table(results), server_table(results)], all_targets(results)
    )


def plan_of(users: int, output_len: int) -> list[PlannedRequest]:
    """The requests: every fourth is answered in one piece."""
    return [PlannedRequest(index, _INPUT_LEN, output_len, stream=index % 4 != 3) for index in range(users)]


def _kill(
    model: str,
    plan: Sequence[PlannedRequest],
    timeout: float,
    options: Mapping[str, Any],
    kind: str | None,
    restart: bool,
) -> KillResult:
    """One server, one kill: of its first process of that kind, or of the process that was started first."""
    shared = _entries(_SHARED_MEMORY)
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        with server(served_model(model, root), {**options, "restart": restart}, root, timeout) as running:
            tree = ProcessTree(running.process.pid)
            before = tree.descriptors()
            kinds = tuple(dict.fromkeys(tree.kinds.values()))
            victim = next(process for process, its_kind in tree.kinds.items() if kind in (None, its_kind))
            records, killed_at = asyncio.run(_load_and_kill(running, plan, victim))
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
    return KillResult(kinds, kind or kinds[0], restart, records, told, state, seconds, noticed, left)


async def _load_and_kill(
    running: RunningServer, plan: Sequence[PlannedRequest], victim: psutil.Process
) -> tuple[list[RequestRecord], float]:
    client = Client(running.address, seed=0, timeout=_ANSWER_TIMEOUT)
    asking = asyncio.create_task(closed_loop(client, plan, len(plan)))
    deadline = time.monotonic() + _LOADED_TIMEOUT
    while client.streaming < sum(each.stream for each in plan):
        if asking.done() or time.monotonic() > deadline:
            asking.cancel()
            raise ServerFailed(f"not all of {len(plan)} requests were under way at the same time; raise --output-len")
        await asyncio.sleep(0.01)
    victim.send_signal(signal.SIGKILL)
    killed_at = time.perf_counter()
    return await asking, killed_at


def _wait_for_the_end(running: RunningServer) -> tuple[str, bool]:
    """What became of the server, in words, and whether its operator can notice that."""
    deadline = time.monotonic() + _END_TIMEOUT
    while time.monotonic() < deadline:
        try:
            code = running.process.wait(0.1)
        except subprocess.TimeoutExpired:
            probe = Client(running.address, seed=1, timeout=_PROBE_TIMEOUT)
            if asyncio.run(probe.ask(PlannedRequest(0, 8, 1))).outcome is Outcome.FINISHED:
                return "serves again", True
        else:
            return (f"killed by {signal.Signals(-code).name}", True) if code < 0 else (f"exit code {code}", code != 0)
    return "runs and does not answer", False


def _left_files(tree: ProcessTree, before: Mapping[str, int]) -> list[str]:
    """Kinds of processes that have more files open than before the load, once they had time to close them."""
    poll(lambda: all(count <= before[kind] for kind, count in tree.descriptors().items()), _SWEEP_TIMEOUT)
    more = {kind: count - before[kind] for kind, count in tree.descriptors().items()}
    return [f"{count} open files of {kind}" for kind, count in more.items() if count > 0]


def _left_processes(tree: ProcessTree) -> list[str]:
    """Kinds of the processes that have not ended in time. They are killed."""
    poll(lambda: not tree.alive(), _SWEEP_TIMEOUT)
    left = tree.alive()
    for process in left:
        process.kill()
    return [f"process {tree.kinds[process]}" for process in left]


def _entries(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()


def request_table(results: Sequence[KillResult]) -> Table:
    """How the requests in flight ended, for each kill."""
    counts = [Counter(record.outcome for record in each.records) for each in results]
    seen = [outcome for outcome in Outcome if any(count[outcome] for count in counts)]
    rows: list[list[Cell]] = [
        [each.name, len(each.records), *(count[outcome] for outcome in seen), "–" if each.told is None else each.told]
        for each, count in zip(results, counts, strict=True)
    ]
    columns = ["killed", "in flight", *seen, "until the last one knew, s"]
    return Table("what happened to the requests in flight", columns, rows)


def server_table(results: Sequence[KillResult]) -> Table:
    """How the server ended or went on, for each kill."""
    rows = [[each.name, each.server, each.seconds, ", ".join(each.left) or "nothing"] for each in results]
    return Table("what happened to the server", ["killed", "server", "that took, s", "left behind"], rows)


def all_targets(results: Sequence[KillResult]) -> list[Target]:
    """All clients must hear the reason, but for those of a process that is gone itself and can tell them nothing."""
    targets: list[Target] = []
    for each in results:
        told = sum(record.outcome in _TOLD for record in each.records) / len(each.records)
        if each.kind != each.kinds[0]:
            targets.append(Target(f"{each.name}: requests with an answer, share", told, 1.0, at_least=True))
        if each.told is not None:
            targets.append(Target(f"{each.name}: until the last one knew, s", each.told, 1.0, at_least=False))
        title = f"{each.name}: ended with an error or serves again, and left nothing"
        targets.append(Target(title, float(each.noticed and not each.left), 1.0, at_least=True))
    return targets
