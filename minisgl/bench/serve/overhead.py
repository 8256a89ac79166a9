"""``python -m minisgl.bench api``: what the server adds to the engine's time for a token batch.

A **token batch** is what one step of the engine brings when N requests decode together: N tokens. Its time is taken
twice, for the same model, options, lengths and N: from `minisgl.LLM` alone in a process of its own, and over HTTP, from
a client that reads N streams. Both are differences between a long wave of requests and a short one, divided by the
steps that the long one has more, so that what happens once a request (connecting, prefill, the last words) cancels out.
The **overhead** is the second less the first: time that passes and is not the engine's.

Time that passes depends on how many cores there are for server, engine and client. What it costs, wherever it runs, is
**processor time**: of each process of the server, as the operating system counts it, by the same difference of waves.
The next batch waits for the scheduler's process alone, while the others work on this one: what that process takes more
than the engine alone is what a step pays for its messages, given a core for each process.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.serve.client import Client
from minisgl.bench.serve.errors import ServerFailed
from minisgl.bench.serve.loops import closed_loop
from minisgl.bench.serve.models import ServedModel, served_model
from minisgl.bench.serve.processes import ProcessTree
from minisgl.bench.serve.run import Subject
from minisgl.bench.serve.server import server
from minisgl.bench.serve.workload import Planned

_TIMEOUT = 600.0
"""Seconds for one wave, and for the engine alone."""
_LIMIT_MS = 1.0
_LIMIT_STREAMS = 256
"""What was aimed at: a millisecond a token batch of this many streams."""
_ENGINE = "engine alone"
_SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class Waves:
    """What is sent.

    Args:
        streams: requests at a time; all of a wave begin together.
        output_len: tokens of each in a long wave; a short one has a quarter.
        repeat: pairs of waves; the median counts.
        input_len: tokens of each prompt.
    """

    streams: tuple[int, ...] = (256, 1024)
    output_len: int = 128
    repeat: int = 3
    input_len: int = 16

    @property
    def short_len(self) -> int:
        """Tokens of each in a short wave."""
        return max(1, self.output_len // 4)

    @property
    def steps(self) -> int:
        """Token batches that a long wave has more than a short one."""
        return self.output_len - self.short_len


def run_overhead(subject: Subject, waves: Waves) -> Report:
    """Both times and their difference for each number of streams, and where the processor time went.

    Args:
        subject: the server, started once for each number of streams with room for as many running requests.
        waves: what is sent.

    Raises:
        ServerFailed: the engine or the server did not do what it should.
    """
    rows: list[list[Cell]] = []
    processes: list[list[Cell]] = []
    added: dict[int, float] = {}
    messages: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        model = served_model(subject.model, root)
        for streams in waves.streams:
            room = {"max_running_requests": streams, "num_pages": streams * _pages_each(waves)}
            options = {**model.options, **room, **subject.options}
            alone, alone_cpu = _engine_alone(model, options, streams, waves)
            served, cpu = _served(model, options, streams, waves, root, subject.start_timeout)
            added[streams] = served - alone
            rows.append([streams, alone, served, added[streams]])
            if _SCHEDULER in cpu:
                messages[streams] = cpu[_SCHEDULER] - alone_cpu
            processes += [
                [streams, name, milliseconds, milliseconds / streams * 1e3]
                for name, milliseconds in {_ENGINE: alone_cpu, **cpu}.items()
            ]
    tables = [
        Table("a token batch, ms", ["streams", _ENGINE, "served", "outside the engine"], rows),
        Table("processor time of a token batch", ["streams", "process", "ms", "µs a token"], processes),
    ]
    settings = {"model": subject.model, "options": dict(subject.options), **asdict(waves)}
    return Report("api", settings, tables, _targets(added, messages))


def _pages_each(waves: Waves) -> int:
    return -(-(waves.input_len + waves.output_len) // 16) + 1


def _targets(added: Mapping[int, float], messages: Mapping[int, float]) -> list[Target]:
    targets: list[Target] = []
    for where, times in (("outside the engine", added), ("messages, in the scheduler's process", messages)):
        if _LIMIT_STREAMS not in times:
            continue
        few = times[_LIMIT_STREAMS]
        targets.append(Target(f"{where}, {_LIMIT_STREAMS} streams, ms", few, _LIMIT_MS, at_least=False))
        for streams, many in times.items():
            if streams > _LIMIT_STREAMS and few > 0.0:
                title = f"{where}, growth from {_LIMIT_STREAMS} to {streams} streams, ×"
                targets.append(Target(title, many / few, streams / _LIMIT_STREAMS, at_least=False))
    return targets


def _engine_alone(model: ServedModel, options: Mapping[str, Any], streams: int, waves: Waves) -> tuple[float, float]:
    """Milliseconds of a token batch without a server, and of processor time, in a process that is gone afterwards."""
    asked = {"model": model.path, "vocab_size": model.vocab_size, "options": dict(options), "streams": streams}
    asked |= {"input_len": waves.input_len, "lengths": [waves.short_len, waves.output_len], "repeat": waves.repeat}
    command = [sys.executable, "-m", "minisgl.bench.serve.engine_alone"]
    try:
        done = subprocess.run(command, input=json.dumps(asked), capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"the engine alone took more than {_TIMEOUT:g} s; ask for fewer tokens") from error
    if done.returncode != 0:
        raise ServerFailed(f"the engine alone ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    pairs: list[list[list[float]]] = json.loads(done.stdout.splitlines()[-1])
    passed, cpu = (
        statistics.median(1e3 * (long[which] - short[which]) / waves.steps for short, long in pairs)
        for which in range(2)
    )
    return passed, cpu


def _served(
    model: ServedModel, options: Mapping[str, Any], streams: int, waves: Waves, root: Path, start_timeout: float
) -> tuple[float, dict[str, float]]:
    """Milliseconds of a token batch over HTTP, and of processor time by kind of process."""
    milliseconds: list[float] = []
    cpu: dict[str, list[float]] = {}
    with server(model.path, model.vocab_size, options, root, start_timeout) as running:
        tree = ProcessTree(running.process.pid)
        for pair in range(-1, waves.repeat):  # the first warms up
            client = Client(running.target, seed=pair + 1, timeout=_TIMEOUT)
            short, short_cpu = _wave(client, tree, streams, waves.input_len, waves.short_len, 0)
            long, long_cpu = _wave(client, tree, streams, waves.input_len, waves.output_len, streams)
            if pair >= 0:
                milliseconds.append(1e3 * (long - short) / waves.steps)
                for kind in long_cpu:
                    cpu.setdefault(kind, []).append(1e3 * (long_cpu[kind] - short_cpu[kind]) / waves.steps)
    return statistics.median(milliseconds), {kind: statistics.median(values) for kind, values in cpu.items()}


def _wave(
    client: Client, tree: ProcessTree, streams: int, input_len: int, output_len: int, first: int
) -> tuple[float, dict[str, float]]:
    """Seconds that a wave took, and seconds of processor time by kind of process."""
    plan = [Planned(first + index, input_len, output_len) for index in range(streams)]
    before = tree.cpu_seconds()
    records = asyncio.run(closed_loop(client, plan, streams))
    after = tree.cpu_seconds()
    failed = [record for record in records if not record.token_times]
    if failed:
        raise ServerFailed(f"a request of a wave has {failed[0].outcome}: {failed[0].message}")
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    return seconds, {kind: after[kind] - before.get(kind, 0.0) for kind in after}
