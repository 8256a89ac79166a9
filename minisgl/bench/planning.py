"""Planning a fleet by `minisgl.bench.simulation`: how many replicas a load needs, and whether to believe that."""

from __future__ import annotations

import gc
import json
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import minisgl
from minisgl.batch import Batch, PendingStep
from minisgl.bench.report import Report
from minisgl.bench.routing import PAGE_SIZE, ROUTERS, CacheAware, RoundRobin, Router
from minisgl.bench.simulation import (
    Arrival,
    Conversations,
    Fleet,
    Outcome,
    Replica,
    ReplicaSpec,
    ReportingCache,
    SimulatedReplica,
    StepTime,
)
from minisgl.bench.workloads import SHAPES, make_engine
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.registry import resolve
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.scheduler import StepOutput

_RESULTS = Path(minisgl.__file__).parent.parent / "benchmarks" / "results"
_WARM_UP = 0.25  # of a trace, whose requests do not count: the caches are empty when it begins
_LONG = 16  # more replicas than these get a shorter trace, and many more only two routers
_FEW = 64
_SHORTEST = 8.0  # seconds of a trace
_IN_TIME = 0.95  # of the requests must keep the objective where a fleet is large enough
_CHECKS = 12  # times that real engines serve the trace; what is compared are means
_AGREE = 0.15  # by which simulated and measured may differ
_PLANNED = 4  # replicas whose load the plan is made for
_SMALL_POOL = 8192
_SMALL = Conversations(
    1.0, 60.0, applications=4, pause=4.0, system_len=250, user_len=60, document_len=300, output_len=16, max_len=1800
)
"""Traffic for an engine with a small model; the unit of time is that in which it is sent one request."""
_REAL_TIME = "real-time"
_SLOW = StepTime(weights=0.05, token=1e-3, key=1e-5, pair=1e-7)
"""Steps so long that they can be slept through on a busy machine."""
_BUSY = 0.7  # share of what one engine can serve that each of two is sent


def calibrated(model: str = "Qwen3-14B") -> StepTime:
    """Step times of a model on an H200, from what ``benchmarks/results`` keeps; `ConfigError` if it keeps too little.

    A token alone takes what ``bs1`` in offline.json says. Prefill is fitted to the prompts that preemption.json has
    computed again, and keys are read as by the fastest attention in attention.json for decode steps of 256 rows.
    """
    try:
        alone = next(row[2] for row in _rows("offline", "workloads") if row[:2] == [model, "bs1"])
        prompts = [(row[1], row[3]) for row in _rows("preemption", "bringing a request back") if row[0] == model]
        size = model.partition("-")[2]
        decode = next(row for row in _rows("attention", f"decode, one layer of {size}") if "on average" in row[0])
    except (OSError, StopIteration) as error:
        raise ConfigError(f"model: {_RESULTS} has no step times of {model!r}; use Qwen3-0.6B or Qwen3-14B") from error
    lengths, millis = np.array(prompts[1:]).T  # the shortest may take no longer than reading the weights
    features = np.stack([lengths, lengths**2 / 2], axis=1)
    token, pair = np.linalg.lstsq(features, millis / 1e3, rcond=None)[0].tolist()
    rows, _, _, mean_len, *_ = decode[0].split()
    layer = min(decode[2:-1]) / 1e6
    key = layer * SHAPES[model]["num_hidden_layers"] / (int(rows) * int(mean_len))
    return StepTime(alone / 1e3, token, key, max(pair, 0.0))


def _rows(benchmark: str, title: str) -> list[list[Any]]:
    record = json.loads((_RESULTS / f"{benchmark}.json").read_text(encoding="utf-8"))
    return next(table["rows"] for table in record["tables"] if table["title"].startswith(title))


class RealReplica(Replica):
    """An `LLM` in a fleet, built by `real_engine`. What its steps took, it remembers as pairs with their batches.

    On a CPU that is the time of this thread, which computes alone: other processes and replicas do not count. So
    several replicas can take turns on one device as if each had one of its own.
    """

    def __init__(self, llm: LLM) -> None:
        cache = llm.scheduler.memory.cache
        assert isinstance(cache, ReportingCache)
        super().__init__(EngineLoop(llm.scheduler, self), cache)
        self.steps: list[tuple[Batch, float]] = []
        self._clock = time.perf_counter if llm.engine.device.type == "cuda" else time.thread_time
        self._engine = llm.engine
        self._batch: Batch | None = None

    def launch(self, batch: Batch) -> PendingStep:
        """As an `Executor`, note what the step computes, and let the engine compute it."""
        self._batch = batch
        return self._engine.launch(batch)

    def timed_step(self) -> tuple[float, StepOutput]:
        self._batch, begin = None, self._clock()
        output = self.loop.step()
        seconds = self._clock() - begin
        if self._batch is not None:
            self.steps.append((self._batch, seconds))
        return seconds, output


def real_engine(model: str, pool_tokens: int, options: Mapping[str, Any]) -> LLM:
    """An engine whose scheduler, memory and cache are those of a `SimulatedReplica`."""
    cache = {"prefix_cache": "minisgl.bench.simulation:ReportingCache", "page_size": PAGE_SIZE}
    sizes = {"num_pages": pool_tokens // PAGE_SIZE, "max_running_requests": 64, "overlap": False}
    return make_engine(model, {**sizes, **cache, **options})


def run_simulation(
    replicas: Sequence[int] = (1, 2, 4, 16, 64, 1000),
    load: float = 7.0,
    seconds: float = 30.0,
    model: str = "Qwen3-14B",
    pool_tokens: int = 150_000,
    ttft_limit: float = 1.0,
    tpot_limit: float = 0.05,
    dollars: float = 3.0,
    check: Sequence[str] = ("real-time", "default"),
    options: Mapping[str, Any] = {},
) -> Report:
    """Fleets of simulated H200s under every router, how many a load needs, and two replicas measured and simulated.

    Each fleet gets ``load`` requests a second and replica. Large fleets get a shorter trace, and two routers.
    """
    spec, objective = ReplicaSpec(calibrated(model), pool_tokens), (ttft_limit, tpot_limit)
    report = Report("simulate", {"step_time": asdict(spec.step_time), "warm_up": _WARM_UP})
    for kind in check:
        _add_check(report, kind, options)
    columns = ("replicas", "router", "requests", "hit rate, %", "first token p50, s", "p99, s", "a token after it, ms")
    title = f"{load:g} requests a second and replica, {model} on H200s: in time means {ttft_limit:g} s and "
    title += f"{1e3 * tpot_limit:g} ms a token"
    table = report.table(title, *columns, "in time, %", "in time, a second", "$ a million tokens", "busiest / mean")
    cases = []
    for number in replicas:
        lasts = max(min(_SHORTEST, seconds), seconds * min(1.0, (_LONG / number) ** 0.5))
        traffic = Conversations(load * number, lasts, max(8, 2 * number))
        names = ROUTERS if number <= _FEW else ("round-robin", "kv-aware")
        cases += [(spec, traffic, number, name) for name in names]
    plan = report.table(
        f"replicas that {_PLANNED * load:g} requests a second need, {_IN_TIME:.0%} of them in time",
        "router", "replicas", "hit rate, %", "in time, %", "$ a million tokens",
    )  # fmt: skip
    traffic = Conversations(_PLANNED * load, seconds, 2 * _PLANNED)
    # The largest first, so that no processor is left with one at the end.
    with ProcessPoolExecutor(os.cpu_count(), mp_context=get_context("spawn")) as pool:
        planned = [pool.submit(_smallest, spec, traffic, name, objective) for name in ROUTERS]
        running = {case: pool.submit(serve_traffic, *case) for case in sorted(cases, key=lambda case: -case[2])}
        for case in cases:
            outcome = running[case].result()
            good = outcome.good(*objective)
            p50, p99 = np.percentile(outcome.ttft, (50, 99)).tolist()
            table.add(
                *case[2:], len(good), 100 * outcome.hit_rate, p50, p99, 1e3 * float(np.median(outcome.tpot)),
                100 * float(good.mean()), float(good.sum()) / outcome.seconds,
                outcome.dollars_per_million(good, dollars), outcome.imbalance,
            )  # fmt: skip
        for name, future in zip(ROUTERS, planned, strict=True):
            outcome = future.result()
            good = outcome.good(*objective)
            cost = outcome.dollars_per_million(good, dollars)
            plan.add(name, outcome.num_replicas, 100 * outcome.hit_rate, 100 * float(good.mean()), cost)
    return report


def serve_traffic(spec: ReplicaSpec, traffic: Conversations, num_replicas: int, router: str) -> Outcome:
    """What a fleet makes of the requests that do not belong to the warm-up."""
    gc.freeze()
    replicas = [SimulatedReplica(spec, seed) for seed in range(num_replicas)]
    fleet = Fleet(replicas, make_router(router, num_replicas, spec.pool_tokens))
    return fleet.run(traffic.arrivals(), traffic.seconds).since(_WARM_UP * traffic.seconds)


def make_router(name: str, num_replicas: int, pool_tokens: int) -> Router:
    """A router of `ROUTERS`; that which has to guess is told how much a replica can keep."""
    if name == "cache-aware":
        return CacheAware(num_replicas, pool_tokens // PAGE_SIZE)
    return resolve("router", name, ROUTERS)(num_replicas)


def _smallest(spec: ReplicaSpec, traffic: Conversations, router: str, objective: tuple[float, float]) -> Outcome:
    """The smallest fleet that keeps the objective, or one of twice as many replicas as the load was made for."""
    for number in range(2, 2 * _PLANNED + 1):
        outcome = serve_traffic(spec, traffic, number, router)
        if outcome.good(*objective).mean() >= _IN_TIME:
            break
    return outcome


class RealTimeFleet(Fleet):
    """Simulated replicas in real time: each is a thread that sleeps as long as its steps take.

    Nothing here is ordered by a clock that only the simulation has, so this is what `Fleet` has to agree with.
    """

    def _serve(self, trace: Sequence[Arrival]) -> None:
        self._changed = threading.Condition()
        self._open, self._begin = True, time.perf_counter()
        with ThreadPoolExecutor(len(self.replicas)) as pool:
            working = [pool.submit(self._work, number) for number in range(len(self.replicas))]
            for uid, arrival in enumerate(trace):
                time.sleep(max(0.0, arrival.time - self._elapsed()))
                with self._changed:
                    self._arrive(uid, arrival)
                    self._changed.notify_all()
            with self._changed:
                self._open = False
                self._changed.notify_all()
        for each in working:
            each.result()

    def _elapsed(self) -> float:
        return time.perf_counter() - self._begin

    def _work(self, number: int) -> None:
        replica, scheduler = self.replicas[number], self.replicas[number].loop.scheduler
        while True:
            with self._changed:
                self._changed.wait_for(lambda: scheduler.has_work or not self._open)
                if not scheduler.has_work:
                    return
                end, first, finished = replica.step(self._elapsed())
            time.sleep(max(0.0, end - self._elapsed()))
            with self._changed:
                self.now = self._elapsed()
                self._end(number, first, finished)

    def _start(self, number: int) -> None:
        pass  # its thread does

    def _at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        act(*arguments)


def _add_check(report: Report, kind: str, options: Mapping[str, Any]) -> None:
    """Two replicas as they were measured, in ``"real-time"`` or with a model, against two simulated ones.

    The step times of a model are fitted to the steps that were measured, each time anew, because a machine is not
    equally fast at all times. So this checks all but them: what is batched with what, who waits for whom, what a router
    finds and where it sends a request.
    """
    what = "replicas in real time" if kind == _REAL_TIME else f"engines with {kind}, step by step"
    table = report.table(
        f"two {what}, measured and simulated", "router", "", "requests", "hit rate, %",
        "first token, mean s", "p50, s", "p90, s", "a token after it, ms", "whole answer, mean s",
    )  # fmt: skip
    at_once = [each._replace(time=0.0) for each in replace(_SMALL, seed=1).arrivals()]
    engines = [] if kind == _REAL_TIME else [real_engine(kind, _SMALL_POOL, options) for _ in range(2)]
    spec = ReplicaSpec(_SLOW, _SMALL_POOL, max_seq_len=engines[0].max_seq_len if engines else 16_384)
    for llm in engines:  # what an engine does for the first time does not count
        Fleet([RealReplica(llm)], RoundRobin(1)).run(at_once, 1.0)
        llm.scheduler.memory.forget_unlocked()
    alone: Replica = RealReplica(engines[0]) if engines else SimulatedReplica(spec)
    unit = float(Fleet([alone], RoundRobin(1)).run(at_once, 1.0).finished.max() / len(at_once) / _BUSY)
    traffic = replace(_SMALL, rate=2 / unit, seconds=_SMALL.seconds * unit, pause=_SMALL.pause * unit)
    for name in ("round-robin", "kv-aware"):
        outcomes: dict[str, list[Outcome]] = {"measured": [], "simulated": []}
        for seed in range(_CHECKS if engines else 1):
            for llm in engines:  # their caches are empty, too
                llm.scheduler.memory.forget_unlocked()
            real = [RealReplica(llm) for llm in engines]
            router = make_router(name, 2, _SMALL_POOL)
            fleet = Fleet(real, router) if real else RealTimeFleet([SimulatedReplica(spec) for _ in range(2)], router)
            outcomes["measured"].append(fleet.run(traffic.arrivals(), traffic.seconds))
            if steps := [step for replica in real for step in replica.steps]:
                spec = replace(spec, step_time=StepTime.fitted(*zip(*steps, strict=True)))
            fleet = Fleet([SimulatedReplica(spec, 2 * seed + n) for n in range(2)], make_router(name, 2, _SMALL_POOL))
            outcomes["simulated"].append(fleet.run(traffic.arrivals(), traffic.seconds))
        step_time = asdict(replace(spec.step_time, spread=()))
        report.settings[f"check {kind}, {name}"] = {"step_time": step_time, "pool_tokens": _SMALL_POOL}
        found: dict[str, list[float]] = {}
        for way, some in outcomes.items():
            found[way] = np.mean([_check_numbers(each) for each in some], axis=0).tolist()
            table.add(name, way, sum(len(each.first) for each in some), *found[way])
        for column, taken, expected in zip(table.columns[3:], *found.values(), strict=True):
            title = f"{kind}, {name}, {column.rpartition(',')[0]}: simulated and measured differ by, %"
            report.target(title, 100 * abs(expected / taken - 1), 100 * _AGREE, at_least=False)


def _check_numbers(outcome: Outcome) -> list[float]:
    p50, p90 = np.percentile(outcome.ttft, (50, 90)).tolist()
    whole = float((outcome.finished - outcome.arrived).mean())
    return [100 * outcome.hit_rate, float(outcome.ttft.mean()), p50, p90, 1e3 * float(np.median(outcome.tpot)), whole]
