"""``python -m minisgl.bench serve``: latency, throughput and goodput of a server under one load after another."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from minisgl.bench.client import Client, ClientMonitor, Outcome, RequestRecord, closed_loop, monitor_client, open_loop
from minisgl.bench.load import LoadError, PlannedRequest, Traffic
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.server import VOCAB_SIZE, ProcessTree, ServerMonitor, monitor_server, running_server

_ENVIRONMENT = ("OMP_NUM_THREADS", "ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")
"""Variables that decide over time and memory on a CPU. PyTorch and oneDNN cache compiled code for up to a thousand
shapes: some hundred MiB that come in slowly and are no leak. Capacities of 1 and 0 tell the two apart."""
_USERS = 16
_WARM_UP = 8  # requests before the first load: connections, kernels and caches are there when it begins
_PAUSE = 1.0  # seconds after them, in which the server closes their connections
_NONE = "–"
_MIB = 2**20
_FLAT = 1.02  # growth of memory over the second half, as a factor, that counts as flat: allocators breathe
_BUSY = 0.8  # share of a core from which on the client may be what is measured


class SLO(NamedTuple):
    """Service-level objective, in seconds: the longest wait for the first token, and for each one after it."""

    ttft: float
    tpot: float

    def met_by(self, record: RequestRecord) -> bool:
        """Whether a request finished, and in time. An answer of one token has no time per token to exceed."""
        in_time = record.outcome is Outcome.FINISHED and record.ttft <= self.ttft
        return in_time and (record.tpot is None or record.tpot <= self.tpot)


@dataclass(frozen=True)
class LoadSummary:
    """The numbers of a run under one load, named in words, with at least one request. Times are in seconds."""

    load: str
    records: Sequence[RequestRecord]
    slo: SLO

    @cached_property
    def finished(self) -> list[RequestRecord]:
        """The requests that count for times: those with all their tokens."""
        return [record for record in self.records if record.outcome is Outcome.FINISHED]

    @cached_property
    def seconds(self) -> float:
        """From the first request to the end of the last."""
        return max(record.ended for record in self.records) - min(record.due for record in self.records)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(record.outcome for record in self.records)

    @property
    def answered(self) -> float:
        """Share of the requests that were answered as they should be, by `RequestRecord.answered`."""
        return sum(record.answered for record in self.records) / len(self.records)

    @property
    def throughput(self) -> float:
        """Finished requests a second."""
        return len(self.finished) / self.seconds

    @property
    def output_throughput(self) -> float:
        """Tokens of finished requests a second."""
        return sum(record.tokens for record in self.finished) / self.seconds

    @property
    def goodput(self) -> float:
        """Requests a second that finished within the objective (the measure of DistServe, OSDI '24)."""
        return sum(map(self.slo.met_by, self.records)) / self.seconds

    @property
    def ttft(self) -> list[float]:
        return [record.ttft for record in self.finished]

    @property
    def tpot(self) -> list[float]:
        """Times per token after the first: one mean for each request of two or more tokens."""
        return [record.tpot for record in self.finished if record.tpot is not None]

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies of all answers together: a stutter shows here, and not in a mean."""
        return [float(gap) for record in self.finished for gap in np.diff(record.token_times)]

    @property
    def largest_gaps(self) -> list[float]:
        """The longest time between two pieces, of each request with two or more: the stutter that its user sees."""
        return [float(max(np.diff(record.token_times))) for record in self.finished if len(record.token_times) > 1]

    @property
    def latency(self) -> list[float]:
        return [record.latency for record in self.finished]

    @property
    def little(self) -> float:
        """Requests in flight by Little's law: arrivals a second, times the mean time in the system."""
        return sum(record.ended - record.sent for record in self.records) / self.seconds


def percentiles(values: Sequence[float], *percents: float) -> list[float] | None:
    """Linearly interpolated percentiles, in the order asked for; None if there are no values."""
    if not values:
        return None
    found: list[float] = np.percentile(values, percents).tolist()
    return found


class LoadRun(NamedTuple):
    """One load: its answers, the client, the pieces of answers that it read, and the server if it can be watched."""

    summary: LoadSummary
    client: ClientMonitor
    pieces: int
    server: ServerMonitor | None


def run_serve(
    *,
    url: str | None = None,
    model: str = "tiny",
    options: Mapping[str, Any] = {},
    vocab_size: int = VOCAB_SIZE,
    start_timeout: float = 600.0,
    rate: Sequence[float] | None = None,
    concurrency: Sequence[int] | None = None,
    arrivals: Sequence[str] = ("poisson",),
    requests: int | None = None,
    input_len: Sequence[int] = (128, 128),
    output_len: Sequence[int] = (64, 64),
    disconnects: float = 0.0,
    malformed: float = 0.0,
    ttft_limit: float = 1.0,
    tpot_limit: float = 0.05,
    timeout: float = 300.0,
    seed: int = 0,
) -> Report:
    """Latency, throughput and goodput under each load, and what it left behind in the server."""
    if any(value <= 0 for value in rate or ()):
        raise LoadError(f"rate: must be positive, got {rate}")
    kind, *files = arrivals
    if kind not in ("poisson", "constant", "trace") or len(files) != (kind == "trace"):
        raise LoadError(f"arrivals: must be poisson, constant, or trace FILE, got {' '.join(arrivals)}")
    if min(disconnects, malformed) < 0.0 or disconnects + malformed > 1.0:
        raise LoadError(f"disconnects, malformed: shares that add up to 1 at most, got {disconnects}, {malformed}")
    for name, values in (("input_len", input_len), ("output_len", output_len)):
        if len(values) not in (1, 2) or not 1 <= values[0] <= values[-1]:
            raise LoadError(f"{name}: must be one length or the least and the most, at least 1, got {values}")
    lengths = (input_len[0], input_len[-1]), (output_len[0], output_len[-1])
    traffic = Traffic(requests, *lengths, kind, Path(*files) if files else None, disconnects, malformed, seed)
    loads: list[tuple[str, int | None, list[PlannedRequest]]]  # in words, the users of a closed loop, what is sent
    if rate:
        loads = [(f"{each:g}/s", None, traffic.plan(each, run)) for run, each in enumerate(rate)]
    elif files and not concurrency:
        loads = [("as recorded", None, traffic.plan(None, 0))]
    else:
        loads = [(f"{each} users", each, traffic.plan(None, run)) for run, each in enumerate(concurrency or [_USERS])]
    with running_server(url, model, options, vocab_size, start_timeout) as (address, tree):
        warm_up = [PlannedRequest(index, 16, 8) for index in range(_WARM_UP)]
        asyncio.run(closed_loop(Client(address, seed, timeout), warm_up, _WARM_UP))
        time.sleep(_PAUSE)
        runs: list[LoadRun] = []
        for number, load in enumerate(loads, start=1):
            client = Client(address, seed + number, timeout)  # other prompts: those of the run before are cached
            runs.append(asyncio.run(_run(client, tree, *load, SLO(ttft_limit, tpot_limit))))
    report = load_report(runs)
    report.settings |= {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
    report.settings["model"] = address.model if url else model
    return report


async def _run(
    client: Client, tree: ProcessTree | None, load: str, users: int | None, plan: list[PlannedRequest], slo: SLO
) -> LoadRun:
    watching = nullcontext() if tree is None else monitor_server(tree, client.address)
    async with watching as watched, monitor_client(client) as monitor:
        records = await (open_loop(client, plan) if users is None else closed_loop(client, plan, users))
    return LoadRun(LoadSummary(load, records, slo), monitor, client.pieces, watched)


def _targets(run: LoadRun) -> Iterator[Target]:
    """Goals that hold under any load, and conditions under which the numbers mean something."""
    load, busy = run.summary.load, run.client.cpu / run.client.seconds
    yield Target(f"{load}: requests answered, share", run.summary.answered, 1.0, at_least=True)
    yield Target(f"{load}: client's share of a core", busy, _BUSY, at_least=False)
    server = run.server
    if server is None:
        return
    files = sum(server.after.values()) / sum(server.before.values())
    yield Target(f"{load}: open files, after / before", files, 1.0, at_least=False)
    growth = server.growth(server.total)
    if growth is not None:
        factor = 1.0 + growth / (server.total[-1] - growth)
        yield Target(f"{load}: memory, end / half-time", factor, _FLAT, at_least=False)
    if server.gauges is not None:
        back = 1.0 - server.gauges.used_pages / server.gauges.pages
        yield Target(f"{load}: pages given back, share", back, 1.0, at_least=True)


def load_report(runs: Sequence[LoadRun]) -> Report:
    """A row for each load in every table, then a table of each server's processes; goals, and memory over time."""
    report = Report("serve")
    slo, seen = runs[0].summary.slo, [each for each in Outcome if any(run.summary.outcomes[each] for run in runs)]
    good = f"good is a first token in {slo.ttft:g} s and then {1e3 * slo.tpot:g} ms a token"
    throughput = report.table(f"throughput; {good}", "load", "requests/s", "output tokens/s", "good requests/s", "good")
    from_due = "time to first token (TTFT), and to the end (E2E), from when the request was due"
    columns = ["load", "TTFT p50", "TTFT p90", "TTFT p99", "E2E p50", "E2E p90", "E2E p99"]
    latency = report.table(f"percentiles, ms: {from_due}", *columns)
    between = "time per output token after the first (TPOT), between two pieces (ITL), the largest of an answer"
    columns = ["load", "TPOT p50", "TPOT p99", "ITL p50", "ITL p99", "largest p50", "largest p99"]
    pace = report.table(f"percentiles, ms: {between}", *columns)
    ends = report.table("what became of the requests", "load", "sent", "of them malformed", *seen)
    lateness = "ms that its clock and its sending were late; in flight, counted and by Little's law"
    columns = ["load", "share of a core", "µs a piece", "delay p99", "delay max", "late p99", "in flight", "Little"]
    itself = report.table(f"the client itself: CPU; {lateness}", *columns)
    for run in runs:
        of, client = run.summary, run.client
        share = of.goodput / of.throughput if of.finished else 0.0
        throughput.add(of.load, of.throughput, of.output_throughput, of.goodput, f"{share:.0%}")
        latency.add(of.load, *_millis(of.ttft, 50, 90, 99), *_millis(of.latency, 50, 90, 99))
        pace.add(of.load, *(each for times in (of.tpot, of.itl, of.largest_gaps) for each in _millis(times, 50, 99)))
        wrong = sum(record.planned.malformed is not None for record in of.records)
        ends.add(of.load, len(of.records), wrong, *(of.outcomes[outcome] for outcome in seen))
        piece = 1e6 * client.cpu / run.pieces if run.pieces else _NONE
        late = [record.sent - record.due for record in of.records]
        delays = (*_millis(client.delays, 99, 100), *_millis(late, 99))
        itself.add(of.load, client.cpu / client.seconds, piece, *delays, client.in_flight / client.seconds, of.little)
        report.targets += _targets(run)
        if run.server is not None:
            report.tables.append(_server_table(of.load, run.server))
            report.samples[f"{of.load}: memory, MiB"] = run.server.curve
    return report


def _server_table(load: str, server: ServerMonitor) -> Table:
    memory = {kind: [sample.get(kind, 0) for sample in server.resident] for kind in server.tree.kinds.values()}
    memory["all"] = server.total
    files = [{**each, "all": sum(each.values())} for each in (server.before, server.after)]
    gauges = server.gauges
    left = f"{gauges.running + gauges.waiting} requests, {gauges.used_pages} pages" if gauges else "not told by it"
    columns = ["process", "MiB before", "at half", "at the end", "growth in 2nd half", "files before", "after"]
    table = Table(f"server's processes, {load}; in use at the end: {left}", columns)
    for kind, values in memory.items():
        sizes = [value / _MIB for value in (values[0], values[len(values) // 2], values[-1])]
        growth = server.growth(values)
        table.add(kind, *sizes, _NONE if growth is None else growth / _MIB, *(each.get(kind, 0) for each in files))
    return table


def _millis(values: Sequence[float], *percents: float) -> list[Cell]:
    found = percentiles(values, *percents)
    return [_NONE] * len(percents) if found is None else [1e3 * value for value in found]
