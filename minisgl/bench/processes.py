"""A server's processes: what they add to the engine's time for a token batch, and what the loss of each costs.

A **token batch** is what one step of the engine brings when N requests decode together: N tokens. It is timed twice,
for the same model, options, lengths and N: with `minisgl.llm.LLM` alone in a process of its own, and over HTTP, with a
client that reads N streams. Both times are differences between a long wave of requests and a short one, divided by the
additional steps of the long one, so that costs per request (connecting, prefill, the last words) cancel out. The
**overhead** is the second time less the first.

Elapsed time depends on how many cores there are for server, engine and client. **Processor time**, of each process of
the server by the same difference of waves, does not. The next batch waits for the scheduler's process alone: given a
core for each process, a step pays what that process takes more than the engine alone.
"""

from __future__ import annotations

import asyncio
import signal
import statistics
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from minisgl.bench.client import Client, Outcome, RequestRecord, closed_loop
from minisgl.bench.load import PlannedRequest, prompt_tokens
from minisgl.bench.report import Report, Target
from minisgl.bench.server import ProcessTree, RunningServer, ServedModel, ServerFailed, poll, served_model, server
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

_WAVE_TIMEOUT = 600.0  # seconds
_LIMIT_MS = 1.0
_LIMIT_STREAMS = 256  # the goal is a millisecond a token batch of this many streams
_ELAPSED, _ENGINE, _SCHEDULER = "elapsed", "engine alone", "scheduler"
_TIMEOUT = 60.0  # seconds that all streams have to begin, a request to end, and the server to end or to serve again
_SHORT_TIMEOUT = 5.0  # of the request that asks whether it serves, and for processes and sockets that end with others
_INPUT_LEN = 16
_SHARED_MEMORY = Path("/dev/shm")
_HANG_TIMEOUT = 2.0  # seconds after which a process that stands still is killed
_TOLD = (Outcome.FINISHED, Outcome.REFUSED, Outcome.FAILED)


class Waves(NamedTuple):
    """What is sent, on both sides."""

    streams: int  # requests of a wave, which all begin together
    output_len: int  # tokens of each in a long wave; a short one has a quarter
    repeat: int  # pairs of waves; the median counts

    def milliseconds(self, wave: Callable[[range, int, int], dict[str, float]]) -> dict[str, float]:
        """Median times of a token batch, by name, from the seconds that `wave` says for indices, length and seed."""
        lengths = (max(1, self.output_len // 4), self.output_len)
        times: defaultdict[str, list[float]] = defaultdict(list)
        for seed in range(self.repeat + 1):  # the first warms up
            indices = range(self.streams), range(self.streams, 2 * self.streams)
            short, long = map(wave, indices, lengths, (seed, seed))
            for name in long if seed > 0 else ():
                times[name].append(1e3 * (long[name] - short[name]) / (lengths[1] - lengths[0]))
        return {name: statistics.median(each) for name, each in times.items()}


def run_overhead(
    model: str = "tiny",
    options: Mapping[str, Any] = {},
    start_timeout: float = 600.0,
    streams: Sequence[int] = (256, 1024),
    output_len: int = 128,
    repeat: int = 3,
) -> Report:
    """Both times and their difference for each number of streams, and where the processor time went."""
    report = Report("api", {"input_len": _INPUT_LEN})
    batch = report.table("a token batch, ms", "streams", _ENGINE, "served", "outside the engine")
    processes = report.table("processor time of a token batch", "streams", "process", "ms", "µs a token")
    added, messages = dict[int, float](), dict[int, float]()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        served = served_model(model, root)
        for count in streams:
            waves = Waves(count, output_len, repeat)
            pages = count * (-(-(_INPUT_LEN + output_len) // 16) + 1)
            room = {**served.options, "max_running_requests": count, "num_pages": pages, **options}
            with ProcessPoolExecutor(1, get_context("spawn")) as new_process:
                times = new_process.submit(_engine_alone, served, room, waves).result()
            alone = times.pop(_ELAPSED)
            times |= _served(served, room, waves, root, start_timeout)
            over_http = times.pop(_ELAPSED)
            added[count] = over_http - alone
            batch.add(count, alone, over_http, added[count])
            if _SCHEDULER in times:
                messages[count] = times[_SCHEDULER] - times[_ENGINE]
            for kind, ms in times.items():
                processes.add(count, kind, ms, ms / count * 1e3)
    report.targets += overhead_targets(added, messages)
    return report


def overhead_targets(added: Mapping[int, float], messages: Mapping[int, float]) -> Iterator[Target]:
    """Goals for milliseconds by number of streams, elapsed and in the scheduler's process."""
    for where, times in (("outside the engine", added), ("messages, in the scheduler's process", messages)):
        if (few := times.get(_LIMIT_STREAMS)) is None:
            continue
        yield Target(f"{where}, {_LIMIT_STREAMS} streams, ms", few, _LIMIT_MS, at_least=False)
        for streams, many in times.items():
            if streams > _LIMIT_STREAMS and few > 0.0:
                title = f"{where}, growth from {_LIMIT_STREAMS} to {streams} streams, ×"
                yield Target(title, many / few, streams / _LIMIT_STREAMS, at_least=False)


def _engine_alone(model: ServedModel, options: dict[str, Any], waves: Waves) -> dict[str, float]:
    """Milliseconds of a token batch without a server, elapsed, and of the processor time of this whole process."""
    llm = LLM(model.path, **options)

    def wave(indices: range, output_len: int, seed: int) -> dict[str, float]:
        prompts = [prompt_tokens(index, _INPUT_LEN, None, model.vocab_size, seed) for index in indices]
        begin, cpu = time.perf_counter(), time.process_time()
        llm.generate(prompts, SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True))
        return {_ELAPSED: time.perf_counter() - begin, _ENGINE: time.process_time() - cpu}

    return waves.milliseconds(wave)


def _served(
    model: ServedModel, options: Mapping[str, Any], waves: Waves, root: Path, start_timeout: float
) -> dict[str, float]:
    """Milliseconds of a token batch over HTTP, and of processor time by kind of process."""
    with server(model, options, root, start_timeout) as running:
        tree = ProcessTree(running.process.pid)

        def wave(indices: range, output_len: int, seed: int) -> dict[str, float]:
            plan = [PlannedRequest(index, _INPUT_LEN, output_len) for index in indices]
            before = tree.cpu_seconds()
            records = asyncio.run(closed_loop(Client(running.address, seed, _WAVE_TIMEOUT), plan, len(plan)))
            after = tree.cpu_seconds()
            failed = [record for record in records if not record.token_times]
            if failed:
                raise ServerFailed(f"a request of a wave has {failed[0].outcome}: {failed[0].message}")
            seconds = max(record.ended for record in records) - min(record.sent for record in records)
            return {_ELAPSED: seconds, **{kind: after[kind] - before.get(kind, 0.0) for kind in after}}

        return waves.milliseconds(wave)


class KillResult(NamedTuple):
    """What one kill led to, or one stop: a stopped process (SIGSTOP) is there and does nothing."""

    kinds: tuple[str, ...]  # of all processes that the server had
    kind: str  # of the one that was killed
    restart: bool  # whether the server had been told to start lost processes anew
    records: Sequence[RequestRecord]  # of the requests that were in flight
    told: float | None  # seconds from the kill until the last client knew whose request it cost; None if it cost none
    server: str  # its exit code in words, or whether it serves again
    seconds: float  # from when all clients knew until then
    noticed: bool  # whether its operator can tell: it has ended with an error, or it serves again
    left: list[str]  # what it left behind, in words: processes, open files, shared memory, temporary files
    stopped: bool = False  # it was not killed

    @property
    def name(self) -> str:
        return f"{self.kind}{', stopped' * self.stopped}{', --restart' * self.restart}"


def run_faults(
    model: str = "tiny",
    options: Mapping[str, Any] = {},
    start_timeout: float = 600.0,
    users: int = 32,
    output_len: int = 1000,
) -> Report:
    """Start servers for each kind of process that they have, load them, and kill one such process with SIGKILL.

    All but the first, which watches the others, are stopped too, with SIGSTOP. A server that has been told to restart
    what is lost goes through all of it, and what it has left in the end counts for the last.
    """
    # Every fourth is answered in one piece.
    plan = [PlannedRequest(index, _INPUT_LEN, output_len, stream=index % 4 != 3) for index in range(users)]

    def kill(kinds: Sequence[str | None], restart: bool, stop: bool = False) -> list[KillResult]:
        """One server, whose first process of each kind is killed in turn; None is the one that was started first."""
        wanted = {**options, "restart": restart, **({"hang_timeout": _HANG_TIMEOUT} if stop else {})}
        shared, results = _shared_memory(), []
        with tempfile.TemporaryDirectory() as name:
            root = Path(name)
            with server(served_model(model, root), wanted, root, start_timeout) as running:
                for kind in kinds:
                    tree = ProcessTree(running.process.pid)
                    before = tree.descriptors()
                    found = tuple(dict.fromkeys(tree.kinds.values()))
                    victim = next(process for process, its_kind in tree.kinds.items() if kind in (None, its_kind))
                    records, killed_at = asyncio.run(_load_and_kill(running, plan, victim, stop))
                    begin = time.perf_counter()
                    state, noticed = _wait_for_the_end(running)
                    seconds = time.perf_counter() - begin
                    if running.process.poll() is None:
                        tree.kinds |= ProcessTree(running.process.pid).kinds  # with those that it has started anew
                    left = _left_files(tree, before)
                    cost = [record.ended - killed_at for record in records if record.outcome is not Outcome.FINISHED]
                    told, kind = max(cost, default=None), kind or found[0]
                    results.append(KillResult(found, kind, restart, records, told, state, seconds, noticed, left, stop))
            left += _left_processes(tree) + sorted(map(str, _left_memory(shared)))
            left += sorted(f"TMPDIR/{entry.name}" for entry in running.directory.iterdir())
        return results

    first = kill([None], restart=False)
    watching, *engine = first[0].kinds
    results = [result for kind in engine for result in kill([kind], restart=False)]
    results += [*first, *kill([*engine, watching], restart=True)]
    results += [result for kind in engine for result in kill([kind], restart=False, stop=True)]
    return fault_report([*results, *kill(engine, restart=True, stop=True)])


async def _load_and_kill(
    running: RunningServer, plan: Sequence[PlannedRequest], victim: psutil.Process, stop: bool
) -> tuple[list[RequestRecord], float]:
    client = Client(running.address, seed=0, timeout=_TIMEOUT)
    asking = asyncio.create_task(closed_loop(client, plan, len(plan)))
    deadline = time.monotonic() + _TIMEOUT
    while client.streaming < sum(each.stream for each in plan):
        if asking.done() or time.monotonic() > deadline:
            asking.cancel()
            raise ServerFailed(f"not all of {len(plan)} requests were under way at the same time; raise --output-len")
        await asyncio.sleep(0.01)
    victim.send_signal(signal.SIGSTOP if stop else signal.SIGKILL)
    killed_at = time.perf_counter()
    return await asking, killed_at


def _wait_for_the_end(running: RunningServer) -> tuple[str, bool]:
    """What became of the server, in words, and whether its operator can notice that."""
    probe = Client(running.address, seed=1, timeout=_SHORT_TIMEOUT)

    def serves() -> bool:
        return asyncio.run(probe.ask(PlannedRequest(0, 8, 1))).outcome is Outcome.FINISHED

    known = poll(lambda: running.process.poll() is not None or serves(), _TIMEOUT)
    code = running.process.poll()
    if code is None:
        return ("serves again", True) if known else ("runs and does not answer", False)
    return (f"killed by {signal.Signals(-code).name}", True) if code < 0 else (f"exit code {code}", code != 0)


def _left_files(tree: ProcessTree, before: Mapping[str, int]) -> list[str]:
    """Kinds of processes that have more files open than before the load, once they had time to close them."""
    poll(lambda: all(count <= before[kind] for kind, count in tree.descriptors().items()), _SHORT_TIMEOUT)
    more = {kind: count - before[kind] for kind, count in tree.descriptors().items()}
    return [f"{count} open files of {kind}" for kind, count in more.items() if count > 0]


def _left_processes(tree: ProcessTree) -> list[str]:
    """Kinds of the processes that have not ended in time. They are killed."""
    poll(lambda: not tree.alive(), _SHORT_TIMEOUT)
    left = tree.alive()
    for process in left:
        process.kill()
    return [f"process {tree.kinds[process]}" for process in left]


def _shared_memory() -> set[Path]:
    return set(_SHARED_MEMORY.iterdir()) if _SHARED_MEMORY.is_dir() else set()


def _left_memory(before: set[Path]) -> set[Path]:
    """Shared memory that was not there ``before``, and that no process has: the server's have all ended."""
    left = _shared_memory() - before
    for process in psutil.process_iter() if left else ():
        with suppress(psutil.Error):  # ended meanwhile, or another user's
            left -= {Path(mapped.path) for mapped in process.memory_maps()}
    return left


def fault_report(results: Sequence[KillResult]) -> Report:
    """How the requests in flight ended, and how the server ended or went on, for each kill.

    All clients must hear the reason, but for those of a process that is gone itself and can tell them nothing.
    """
    report = Report("faults", {"input_len": _INPUT_LEN})
    counts = [Counter(record.outcome for record in each.records) for each in results]
    seen = [outcome for outcome in Outcome if any(count[outcome] for count in counts)]
    columns = ("killed", "in flight", *seen, "until the last one knew, s")
    requests = report.table("what happened to the requests in flight", *columns)
    servers = report.table("what happened to the server", "killed", "server", "that took, s", "left behind")
    for each, count in zip(results, counts, strict=True):
        sent, told = len(each.records), sum(count[outcome] for outcome in _TOLD)
        requests.add(each.name, sent, *(count[outcome] for outcome in seen), "–" if each.told is None else each.told)
        servers.add(each.name, each.server, each.seconds, ", ".join(each.left) or "nothing")
        if each.kind != each.kinds[0]:
            report.target(f"{each.name}: requests with an answer, share", told / sent, 1.0, at_least=True)
        if each.told is not None:
            limit = 1.0 + 2 * _HANG_TIMEOUT * each.stopped
            report.target(f"{each.name}: until the last one knew, s", each.told, limit, at_least=False)
        fine = f"{each.name}: ended with an error or serves again, and left nothing"
        report.target(fine, float(each.noticed and not each.left), 1.0, at_least=True)
    return report
