"""``python -m minisgl.bench api``: what the server adds to the engine's time for a token batch.

A **token batch** is what one step of the engine brings when N requests decode together: N tokens. It is timed twice,
for the same model, options, lengths and N: with `minisgl.llm.LLM` alone in a process of its own, and over HTTP, with a
client that reads N streams. Both times are differences between a long wave of requests and a short one, divided by the
additional steps of the long one, so that costs per request (connecting, prefill, the last words) cancel out. The
**overhead** is the second time less the first.

Elapsed time depends on how many cores there are for server, engine and client. **Processor time**, of each process of
the server by the same difference of waves, does not. The next batch waits for the scheduler's process alone, while the
others work on this one: given a core for each process, a step pays what the scheduler's process takes more than the
engine alone.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from minisgl.bench.client import Client, closed_loop
from minisgl.bench.load import PlannedRequest, prompt_tokens
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.server import ProcessTree, ServedModel, ServerFailed, served_model, server
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

_TIMEOUT = 600.0  # seconds for one wave, and for the engine alone
_LIMIT_MS = 1.0
_LIMIT_STREAMS = 256  # the goal is a millisecond a token batch of this many streams
_ENGINE = "engine alone"
_SCHEDULER = "scheduler"


@dataclass(frozen=True, slots=True)
class Waves:
    """What is sent, on both sides."""

    streams: Sequence[int]  # numbers of requests at a time; all of a wave begin together
    output_len: int  # tokens of each in a long wave; a short one has a quarter
    repeat: int  # pairs of waves; the median counts
    input_len: int = 16  # tokens of each prompt

    @property
    def lengths(self) -> tuple[int, int]:
        """Output tokens of a short and of a long wave."""
        return max(1, self.output_len // 4), self.output_len

    def milliseconds(self, pairs: Sequence[tuple[float, float]]) -> float:
        """Median time of a token batch, from seconds of pairs of a short and a long wave."""
        short, long = self.lengths
        return statistics.median(1e3 * (after - before) / (long - short) for before, after in pairs)


def run_overhead(
    model: str = "tiny",
    options: Mapping[str, Any] = {},
    start_timeout: float = 600.0,
    streams: Sequence[int] = (256, 1024),
    output_len: int = 128,
    repeat: int = 3,
) -> Report:
    """Both times and their difference for each number of streams, and where the processor time went."""
    waves = Waves(streams, output_len, repeat)
    rows: list[list[Cell]] = []
    processes: list[list[Cell]] = []
    added: dict[int, float] = {}
    messages: dict[int, float] = {}
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        served = served_model(model, root)
        for count in streams:
            pages = count * (-(-(waves.input_len + output_len) // 16) + 1)
            room = {**served.options, "max_running_requests": count, "num_pages": pages, **options}
            alone, alone_cpu = _engine_alone(served, room, count, waves)
            over_http, cpu = _served(served, room, count, waves, root, start_timeout)
            added[count] = over_http - alone
            rows.append([count, alone, over_http, added[count]])
            if _SCHEDULER in cpu:
                messages[count] = cpu[_SCHEDULER] - alone_cpu
            processes += [[count, kind, ms, ms / count * 1e3] for kind, ms in {_ENGINE: alone_cpu, **cpu}.items()]
    tables = [
        Table("a token batch, ms", ["streams", _ENGINE, "served", "outside the engine"], rows),
        Table("processor time of a token batch", ["streams", "process", "ms", "µs a token"], processes),
    ]
    return Report("api", asdict(waves), tables, all_targets(added, messages))


def all_targets(added: Mapping[int, float], messages: Mapping[int, float]) -> list[Target]:
    """Goals for milliseconds by number of streams, elapsed and in the scheduler's process."""
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
    """Milliseconds of a token batch without a server, elapsed and of processor time, in a process of its own."""
    call = f"run_engine_alone({model!r}, {dict(options)!r}, {streams}, {waves!r})"
    code = f"from minisgl.bench.overhead import ServedModel, Waves, run_engine_alone; {call}"
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_TIMEOUT)
    except subprocess.TimeoutExpired as error:
        raise ServerFailed(f"the engine alone took more than {_TIMEOUT:g} s; ask for fewer tokens") from error
    if done.returncode != 0:
        raise ServerFailed(f"the engine alone ended with exit code {done.returncode}:\n{done.stderr[-2000:]}")
    elapsed, cpu = (waves.milliseconds(pairs) for pairs in json.loads(done.stdout.splitlines()[-1]))
    return elapsed, cpu


def run_engine_alone(model: ServedModel, options: dict[str, Any], streams: int, waves: Waves) -> None:
    """Print seconds of pairs of a short and a long wave, then of the processor, in JSON. A pair before warms up."""
    llm = LLM(model.path, **options)

    def wave(number: int, output_len: int, seed: int) -> tuple[float, float]:
        indices = range(number * streams, (number + 1) * streams)
        prompts = [prompt_tokens(index, waves.input_len, None, model.vocab_size, seed) for index in indices]
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True))
        return time.perf_counter() - begin, time.process_time() - cpu

    pairs = [
        [wave(number, length, seed) for number, length in enumerate(waves.lengths)] for seed in range(waves.repeat + 1)
    ]
    print(json.dumps([[(short[kind], long[kind]) for short, long in pairs[1:]] for kind in range(2)]))


def _served(
    model: ServedModel, options: Mapping[str, Any], streams: int, waves: Waves, root: Path, start_timeout: float
) -> tuple[float, dict[str, float]]:
    """Milliseconds of a token batch over HTTP, and of processor time by kind of process."""
    elapsed: list[tuple[float, float]] = []
    cpu: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    with server(model, options, root, start_timeout) as running:
        tree = ProcessTree(running.process.pid)
        for seed in range(waves.repeat + 1):  # the first warms up
            client = Client(running.address, seed, timeout=_TIMEOUT)
            (short, short_cpu), (long, long_cpu) = (
                _wave(client, tree, range(number * streams, (number + 1) * streams), waves.input_len, length)
                for number, length in enumerate(waves.lengths)
            )
            if seed > 0:
                elapsed.append((short, long))
                for kind in long_cpu:
                    cpu[kind].append((short_cpu[kind], long_cpu[kind]))
    return waves.milliseconds(elapsed), {kind: waves.milliseconds(pairs) for kind, pairs in cpu.items()}


def _wave(
    client: Client, tree: ProcessTree, indices: range, input_len: int, output_len: int
) -> tuple[float, dict[str, float]]:
    """Seconds that a wave took, and seconds of processor time by kind of process."""
    plan = [PlannedRequest(index, input_len, output_len) for index in indices]
    before = tree.cpu_seconds()
    records = asyncio.run(closed_loop(client, plan, len(plan)))
    after = tree.cpu_seconds()
    failed = [record for record in records if not record.token_times]
    if failed:
        raise ServerFailed(f"a request of a wave has {failed[0].outcome}: {failed[0].message}")
    seconds = max(record.ended for record in records) - min(record.sent for record in records)
    return seconds, {kind: after[kind] - before.get(kind, 0.0) for kind in after}
