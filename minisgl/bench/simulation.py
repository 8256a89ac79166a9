"""Fleets that we don't have: the real scheduler, memory and prefix cache of each replica, with steps that take no time.

A step moves a clock instead, by what `StepTime` says, and a loop over events in the order of their times joins the
replicas with a router. So queueing, batching, evictions and cache hits are the engine's own; only the model is missing.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import cycle, islice
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from minisgl.batch import Batch
from minisgl.bench.host import SimulatedDevice
from minisgl.bench.routing import PAGE_SIZE, Router, page_names
from minisgl.errors import ConfigError
from minisgl.kvcache.block_hash import Block, BlockHashCache
from minisgl.kvcache.prefix import InsertResult
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler, StepOutput
from minisgl.table import RunningTable

ANSWER = 1  # the token that a model which computes nothing always answers
Floats = NDArray[np.float64]


class Arrival(NamedTuple):
    """A request of a trace: its prompt is made of runs of one token each."""

    time: float  # seconds since the trace's beginning
    ids: tuple[int, ...]
    lens: tuple[int, ...]
    output_len: int

    @property
    def prompt(self) -> Int32Array:
        """The prompt, int32[sum of lens]."""
        return np.repeat(np.array(self.ids, dtype=np.int32), self.lens)


@dataclass(frozen=True, slots=True)
class Conversations:
    """Traffic in the manner of Mooncake's traces (FAST '25): long prompts, short answers, much of it seen before.

    Conversations belong to applications, each with its system prompt; a few are popular (Zipf). A turn sends everything
    before it, the answers included, and comes after a pause, whether or not the answer has. Conversations begin in
    bursts: the gaps are gamma distributed. Some runs of the trace are under way when it begins.
    """

    rate: float  # requests a second, on average
    seconds: float
    applications: int = 8
    turns: float = 4.0  # of a conversation, on average
    pause: float = 8.0  # seconds between two turns, on average
    system_len: int = 1500  # tokens, medians of log-normal distributions
    user_len: int = 250
    document_len: int = 3000  # what a share of the conversations begins with
    with_document: float = 0.4
    output_len: int = 120
    burstiness: float = 2.0  # standard deviation of the gaps over their mean; 1 is Poisson
    max_len: int = 15_000
    seed: int = 0

    def arrivals(self) -> list[Arrival]:
        """All requests in the order of their times."""
        rng, names = np.random.default_rng(self.seed), itertools.count(ANSWER + 1)
        systems = [(next(names), _length(rng, self.system_len)) for _ in range(self.applications)]
        popularity = 1 / np.arange(1, self.applications + 1)
        shape, rate = self.burstiness**-2, self.rate / self.turns
        begin, found = -3 * self.turns * self.pause, []
        while begin < self.seconds:
            begin += rng.gamma(shape, 1 / (shape * rate))
            system = systems[rng.choice(self.applications, p=popularity / popularity.sum())]
            found += [turn for turn in self._conversation(rng, names, begin, *system) if 0 <= turn.time < self.seconds]
        return sorted(found)

    def _conversation(
        self, rng: np.random.Generator, names: Iterator[int], time: float, system: int, system_len: int
    ) -> Iterator[Arrival]:
        ids, lens = [system], [system_len]
        if rng.random() < self.with_document:
            ids.append(next(names))
            lens.append(_length(rng, self.document_len))
        for _ in range(rng.geometric(1 / self.turns)):
            ids.append(next(names))
            lens.append(_length(rng, self.user_len))
            output_len = min(_length(rng, self.output_len), 1000)
            if sum(lens) + output_len > self.max_len:
                return
            yield Arrival(time, tuple(ids), tuple(lens), output_len)
            ids.append(ANSWER)
            lens.append(output_len)
            time += rng.exponential(self.pause)


def _length(rng: np.random.Generator, median: int) -> int:
    return int(np.clip(rng.lognormal(np.log(median), 0.6), median / 8, 4 * median))


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds of a step: the weights are read while its tokens are computed, then come attention's keys and pairs."""

    weights: float  # to read the weights once
    token: float  # to compute a token's linear layers
    key: float  # to read keys and values of one token
    pair: float = 0.0  # a query and a key in attention
    fixed: float = 0.0  # what each step takes besides
    row: float = 0.0  # and each of its requests
    prompt: float = 0.0  # and each that has more than one token to compute
    spread: tuple[float, ...] = (1.0,)  # what steps took, one after another, as a share of this

    def __call__(self, batch: Batch) -> float:
        keys, pairs = _keys_and_pairs(batch)
        products = max(self.weights, self.token * batch.num_tokens)
        beside = self.fixed + self.row * batch.num_rows + self.prompt * _prompts(batch)
        return beside + products + self.key * keys + self.pair * pairs

    @classmethod
    def fitted(cls, batches: Sequence[Batch], seconds: Sequence[float]) -> StepTime:
        """Weighted least squares over measured steps, without what comes out negative.

        A step counts by its error relative to what is *expected* of it. Relative to what it *took*, slow steps would
        count for less than fast ones, and queues would be planned too short. So that no error of the mean is left, the
        result is scaled to the sum of what all steps took.
        """
        rows = np.array(
            [[1.0, batch.num_rows, _prompts(batch), batch.num_tokens, *_keys_and_pairs(batch)] for batch in batches]
        )
        taken, found = np.array(seconds), np.zeros(rows.shape[1])
        expected = taken
        for _ in range(_FITS):
            found[:], used = 0.0, list(range(len(found)))
            while used:
                scaled = rows[:, used] / expected[:, None]
                solved = np.linalg.lstsq(scaled, taken / expected, rcond=None)[0]
                if (solved >= 0).all():
                    found[used] = solved
                    break
                used = [column for column, value in zip(used, solved, strict=True) if value > 0]
            expected = rows @ found
        found *= taken.sum() / expected.sum()
        fixed, row, prompt, token, key, pair = found.tolist()
        return cls(0.0, token, key, pair, fixed, row, prompt, tuple((taken / (rows @ found)).tolist()))


_FITS = 4


def _prompts(batch: Batch) -> int:
    return int((batch.q_lens > 1).sum())


def _keys_and_pairs(batch: Batch) -> tuple[int, float]:
    """Keys that the step's rows read, and pairs of a query and a key that it may see."""
    fed, seen = batch.q_lens.astype(np.int64), batch.seq_lens.astype(np.int64)
    return int(seen.sum()), float((fed * seen - fed * (fed - 1) / 2).sum())


class ReportingCache(BlockHashCache):
    """A prefix cache that tells which pages, by their names, it has stored and removed."""

    def __init__(self, page_size: int) -> None:
        super().__init__(page_size)
        self.events: list[tuple[str, list[int]]] = []  # ("stored" or "removed", names) in the order in which it was

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        before = len(self._blocks)
        result = super().insert(tokens, pages)
        if added := len(self._blocks) - before:
            self.events.append(("stored", [block.key for block in result.handle[-added:]]))
        return result

    def extend(self, handle: tuple[Block, ...], tokens: Int32Array, page: int) -> tuple[Block, ...] | None:
        longer = super().extend(handle, tokens, page)
        if longer is not None:
            self.events.append(("stored", [longer[-1].key]))
        return longer

    def evict(self, count: int) -> Int32Array:
        if gone := [block.key for block in islice(self._unreferenced, count)]:
            self.events.append(("removed", gone))
        return super().evict(count)


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """What all replicas of a fleet are."""

    step_time: StepTime
    pool_tokens: int  # that fit the KV cache
    max_running: int = 64
    max_seq_len: int = 16_384
    batch_policy: str = "prefill-first"
    max_prefill_tokens: int = 8192


class Replica:
    """An engine as the fleet sees it: it runs a step at a time, and says how long that took."""

    def __init__(self, loop: EngineLoop, cache: ReportingCache) -> None:
        self.loop = loop
        self.cache = cache
        self.running = False  # a step
        self._begun: set[int] = set()  # requests that have their first token

    def step(self, now: float) -> tuple[float, list[int], list[Request]]:
        """Run a step from ``now`` on: when it ends, and whose first token and whose last it brings."""
        seconds, output = self.timed_step()
        first = [event.request.uid for event in output.events if event.request.uid not in self._begun]
        self._begun.update(first)
        self._begun.difference_update(request.uid for request in output.finished)
        return now + seconds, first, output.finished

    def timed_step(self) -> tuple[float, StepOutput]:
        """Run a step, and return its seconds."""
        raise NotImplementedError


class SimulatedReplica(Replica):
    """The real scheduler, memory and cache around a model that computes nothing."""

    def __init__(self, spec: ReplicaSpec, seed: int = 0) -> None:
        table, cache = RunningTable(spec.max_running, spec.max_seq_len), ReportingCache(PAGE_SIZE)
        memory = KVMemory(spec.pool_tokens // PAGE_SIZE, table, cache)
        policies = Policies.named(batch_policy=spec.batch_policy)
        # From a random place on, and not at random: a machine that is slow now is slow for a while.
        step_time, begin = spec.step_time, int(np.random.default_rng(seed).integers(len(spec.step_time.spread)))
        shares = islice(cycle(step_time.spread), begin, None)
        self.device = SimulatedDevice(lambda batch: step_time(batch) * next(shares))
        super().__init__(EngineLoop(Scheduler(table, memory, policies, spec.max_prefill_tokens), self.device), cache)

    def timed_step(self) -> tuple[float, StepOutput]:
        self.device.now = 0.0
        output = self.loop.step()
        return self.device.now, output


@dataclass(slots=True)
class Outcome:
    """What became of the requests of a trace, one entry a request in each array."""

    arrived: Floats  # seconds since the beginning
    first: Floats
    finished: Floats
    prompt_len: Int32Array
    output_len: Int32Array
    cached: Int32Array  # tokens of the prompt that were in the replica's cache
    replica: Int32Array
    num_replicas: int
    seconds: float  # that the trace lasts

    def since(self, time: float) -> Outcome:
        """Only the requests that arrived from then on."""
        late = self.arrived >= time
        arrays = {each.name: getattr(self, each.name)[late] for each in fields(self)[:7]}
        return replace(self, seconds=self.seconds - time, **arrays)

    @property
    def ttft(self) -> Floats:
        """Seconds to the first token."""
        return self.first - self.arrived

    @property
    def tpot(self) -> Floats:
        """Seconds a token after the first."""
        seconds: Floats = (self.finished - self.first) / np.maximum(self.output_len - 1, 1)
        return seconds

    @property
    def hit_rate(self) -> float:
        """Share of all prompt tokens that were not computed."""
        return float(self.cached.sum() / self.prompt_len.sum())

    def good(self, ttft: float, tpot: float) -> NDArray[np.bool_]:
        """Which requests kept the objective."""
        return (self.ttft <= ttft) & (self.tpot <= tpot)

    def dollars_per_million(self, good: NDArray[np.bool_], dollars_per_hour: float) -> float:
        """What a million tokens of good answers cost, at this price of a replica."""
        tokens = self.output_len[good].sum()
        return float(self.num_replicas * self.seconds / 3600 * dollars_per_hour / tokens * 1e6) if tokens else np.inf

    @property
    def imbalance(self) -> float:
        """The most requests of a replica over the mean."""
        counts = np.bincount(self.replica, minlength=self.num_replicas)
        return float(counts.max() / counts.mean())


class Fleet:
    """Replicas behind a router, which learns of their caches' events so many seconds later. `run` it once."""

    def __init__(self, replicas: Sequence[Replica], router: Router, event_lag: float = 0.0) -> None:
        self.replicas = replicas
        self.router = router
        self.in_flight = np.zeros(len(replicas), dtype=np.int64)
        self.now = 0.0
        self._event_lag = event_lag
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = itertools.count()

    def run(self, trace: Sequence[Arrival], seconds: float) -> Outcome:
        """Serve a trace that lasts so many seconds, until the last answer is complete."""
        count = len(trace)
        self.first, self.finished = np.zeros(count), np.zeros(count)
        self.cached, self.replica = np.zeros(count, dtype=np.int32), np.zeros(count, dtype=np.int32)
        self._serve(trace)
        lengths = np.array([(sum(each.lens), each.output_len) for each in trace], dtype=np.int32)
        arrived = np.array([each.time for each in trace])
        return Outcome(
            arrived, self.first, self.finished, lengths[:, 0], lengths[:, 1], self.cached, self.replica,
            len(self.replicas), seconds,
        )  # fmt: skip

    def _serve(self, trace: Sequence[Arrival]) -> None:
        for uid, arrival in enumerate(trace):
            self._at(arrival.time, self._arrive, uid, arrival)
        while self._events:
            self.now, _, act, arguments = heapq.heappop(self._events)
            act(*arguments)

    def _at(self, time: float, act: Callable[..., None], *arguments: Any) -> None:
        heapq.heappush(self._events, (time, next(self._count), act, arguments))

    def _arrive(self, uid: int, arrival: Arrival) -> None:
        prompt = arrival.prompt
        chosen = self.router.choose(page_names(prompt[:-1]), self.in_flight)
        self.in_flight[chosen] += 1
        self.replica[uid] = chosen
        params = SamplingParams(
            temperature=0.0, max_tokens=arrival.output_len, ignore_eos=True, logit_bias={ANSWER: 100.0}
        )
        replica = self.replicas[chosen]
        request = Request(uid, prompt, params, max_len=len(prompt) + arrival.output_len, watched=True)
        replica.loop.scheduler.add(request)
        if not replica.running:
            self._start(chosen)

    def _start(self, number: int) -> None:
        replica = self.replicas[number]
        replica.running = replica.loop.scheduler.has_work
        if replica.running:
            end, first, finished = replica.step(self.now)
            self._at(end, self._end, number, first, finished)

    def _end(self, number: int, first: list[int], finished: list[Request]) -> None:
        self.first[first] = self.now
        for request in finished:
            if request.error is not None:
                raise ConfigError(f"pool_tokens: {request.error}")
            self.finished[request.uid] = self.now
            self.cached[request.uid] = request.cached_tokens
        self.in_flight[number] -= len(finished)
        events, self.replicas[number].cache.events = self.replicas[number].cache.events, []
        if events and hasattr(self.router, "stored"):
            self._at(self.now + self._event_lag, self._tell, number, events)
        self._start(number)

    def _tell(self, number: int, events: list[tuple[str, list[int]]]) -> None:
        for kind, names in events:
            getattr(self.router, kind)(number, names)
