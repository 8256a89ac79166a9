"""Prefill and decode apart: one engine computes prompts, another continues them (DistServe, Zhong et al. 2024).

The pages go from one to the other through the host store: the first engine evicts a prompt as soon as it is computed,
and the second finds it when the request is admitted. What is missing there, such as the last page that is not full, is
computed again, so nothing that goes wrong on the way costs more than time. Greedy requests only: sampling counts a
request's tokens from the engine that it is in.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from minisgl.bench.preemption import evict_all
from minisgl.bench.report import Report
from minisgl.bench.workloads import make_engine
from minisgl.errors import ConfigError
from minisgl.kvcache.host_store import HostPages, HostStore
from minisgl.llm import LLM
from minisgl.request import Int32Array
from minisgl.sampling_params import SamplingParams

_STREAM_LEN = 64  # tokens of the prompts of those who read a long answer
_LATE_OUTPUT = 8  # tokens of the answers to the long prompts that arrive meanwhile
_PATIENCE = 0.01  # seconds that an idle engine waits before it looks whether it is still needed


@dataclass(slots=True)
class Job:
    """A prompt that arrives after ``delay`` seconds, and when each of its tokens came."""

    prompt: list[int]
    max_tokens: int
    delay: float = 0.0
    tokens: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.tokens) == self.max_tokens


Inbox = queue.SimpleQueue[Job]


def _work(
    llm: LLM, inbox: Inbox, stop: threading.Event, most: int | None = None, pass_on: Callable[[Job], None] | None = None
) -> None:
    """Step one engine until told to ``stop``. Of each job it generates ``most`` tokens, and then it passes it on."""
    jobs: dict[int, Job] = {}  # by uid of the request
    while not stop.is_set():
        with suppress(queue.Empty):
            while True:
                job = inbox.get(not llm.scheduler.has_work, _PATIENCE)
                left = job.max_tokens - len(job.tokens)
                params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=min(left, most or left))
                request = llm.prepare(job.prompt + job.tokens, params, streaming=True)[0].request
                jobs[request.uid] = job
                llm.scheduler.add(request)
        if not llm.scheduler.has_work:
            continue
        output = llm.core.step()
        now = time.perf_counter()
        for event in output.events:
            jobs[event.request.uid].tokens.append(event.token_id)
            jobs[event.request.uid].times.append(now)
        for request in output.finished:
            job = jobs.pop(request.uid)
            if request.error is not None:
                raise ConfigError(request.error)
            if pass_on is not None and not job.done:
                pass_on(job)


class Handover:
    """The `PageCopier` between two engines of one process: what one saves, the other loads."""

    def __init__(self, source: LLM, target: LLM, num_slots: int) -> None:
        self.num_slots = num_slots
        self._out = HostPages(source.engine.kv_cache, num_slots)
        self._in = HostPages(target.engine.kv_cache, num_slots, shared=self._out)

    def save(self, pages: Int32Array, slots: Int32Array) -> None:
        """Copy pages of the first engine to slots, and wait until they are there."""
        self._in.synchronize()  # what is still being read must not be overwritten
        self._out.save(pages, slots)
        self._out.synchronize()

    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        """Copy slots to pages of the second engine."""
        self._in.load(slots, pages)


class _End:
    """One end of a `HostStore`: a `PageStore` that only saves, or only restores."""

    def __init__(self, store: HostStore, lock: threading.Lock, saves: bool) -> None:
        self._store, self._lock, self._saves = store, lock, saves

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        if self._saves:
            with self._lock:
                self._store.save(names, pages)

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        if self._saves:
            return 0
        with self._lock:
            return self._store.restore(names, pages)


def serve_apart(prefill: LLM, decode: LLM, jobs: Sequence[Job], num_slots: int) -> None:
    """Let one engine compute all prompts and first tokens, and the other one the rest; return when all jobs are done.

    ``num_slots`` pages of host memory are between them; both have the same model, page size and dtype.
    """
    store, lock = HostStore(Handover(prefill, decode, num_slots)), threading.Lock()
    for llm in (prefill, decode):
        llm.scheduler.memory.forget_unlocked()  # pages of earlier requests have no names
        llm.scheduler.memory.offload_to(_End(store, lock, llm is prefill))
    first, second = Inbox(), Inbox()

    def hand_over(job: Job) -> None:
        evict_all(prefill)
        second.put(job)

    _serve(jobs, [first], [partial(_work, prefill, first, most=1, pass_on=hand_over), partial(_work, decode, second)])


def serve_alike(engines: Sequence[LLM], jobs: Sequence[Job]) -> None:
    """Give the jobs to the engines in turn, each of which does everything for its own."""
    inboxes = [Inbox() for _ in engines]
    _serve(jobs, inboxes, [partial(_work, llm, inbox) for llm, inbox in zip(engines, inboxes, strict=True)])


def _serve(jobs: Sequence[Job], inboxes: Sequence[Inbox], workers: Sequence[Callable[..., None]]) -> None:
    """Put each job into the next inbox when its time has come. An error of a worker ends all, and is raised."""
    stop = threading.Event()
    with ThreadPoolExecutor(len(workers)) as pool:
        working = [pool.submit(work, stop=stop) for work in workers]
        start = time.perf_counter()
        try:
            for number, job in enumerate(sorted(jobs, key=lambda job: job.delay)):
                time.sleep(max(0.0, start + job.delay - time.perf_counter()))
                job.delay = time.perf_counter()  # from now on, when it arrived
                inboxes[number % len(inboxes)].put(job)
            while not all(job.done for job in jobs) and not any(each.done() for each in working):
                time.sleep(_PATIENCE)
        finally:
            stop.set()
    for each in working:
        each.result()


def run_apart(
    model: str = "Qwen3-0.6B",
    streams: int = 32,
    requests: int = 16,
    rate: float = 4.0,
    input_len: int = 4096,
    output_len: int = 256,
    devices: Sequence[str] = ("auto", "auto"),
    repeat: int = 3,
    options: Mapping[str, Any] = {},
) -> Report:
    """Streams of long answers, and long prompts that arrive meanwhile, on two engines: alike, and apart.

    The gap is between two tokens of a stream; with engines alike, a long prompt is computed where streams are decoded.
    All numbers are medians of ``repeat`` runs; the single ones are in the report.
    """
    report = Report("apart", {"stream_len": _STREAM_LEN, "late_output": _LATE_OUTPUT})
    columns = (
        "engines", "largest gap, median ms", "worst gap, ms", "first token of a long prompt, median ms",
        "from there to its second, median ms", "tokens/s",
    )  # fmt: skip
    title = f"{streams} streams and {requests} prompts of {input_len} tokens, on {devices[0]} and {devices[1]}"
    table = report.table(title, *columns)
    page_size = options.get("page_size", 16)
    tokens = streams * (_STREAM_LEN + output_len) + requests * (input_len + _LATE_OUTPUT)
    num_pages = tokens // page_size + streams + requests
    sizes = {"num_pages": num_pages, "max_seq_len": max(input_len, _STREAM_LEN) + output_len}
    cases = {"alike, prefill first": "prefill-first", "alike, mixed steps": "mixed", "apart": "prefill-first"}
    for label, policy in cases.items():
        # Both are built before either runs: captured graphs and allocations of one would disturb the other.
        engines = [make_engine(model, {**sizes, "batch_policy": policy, "device": name, **options}) for name in devices]
        runs = []
        for seed in range(1 + repeat):  # the first compiles what is left to compile
            jobs = _jobs(engines[0], seed, streams, requests, rate, input_len, output_len)
            if label == "apart":
                serve_apart(engines[0], engines[1], jobs, num_pages)
            else:
                serve_alike(engines, jobs)
            runs.append(_summary(jobs, streams))
        measured = list(zip(*runs[1:], strict=True))
        report.samples |= {f"{label}, {name}": list(each) for name, each in zip(columns[1:], measured, strict=True)}
        table.add(label, *map(median, measured))
        for llm in engines:
            llm.close()
    return report


def _jobs(llm: LLM, seed: int, streams: int, requests: int, rate: float, input_len: int, output_len: int) -> list[Job]:
    """The streams first, which all arrive at once."""
    rng = np.random.default_rng(seed)

    def prompt(length: int) -> list[int]:
        ids: list[int] = rng.integers(llm.model_config.vocab_size, size=length).tolist()
        return ids

    late = [Job(prompt(input_len), _LATE_OUTPUT, delay=(1 + number) / rate) for number in range(requests)]
    return [Job(prompt(_STREAM_LEN), output_len) for _ in range(streams)] + late


def _summary(jobs: Sequence[Job], streams: int) -> list[float]:
    """The numbers of a row, in the order of the columns."""
    gaps = [1e3 * float(np.diff(job.times).max()) for job in jobs[:streams]]
    late = jobs[streams:]
    seconds = max(job.times[-1] for job in jobs) - min(job.delay for job in jobs)
    to_first = 1e3 * median(job.times[0] - job.delay for job in late)
    to_second = 1e3 * median(job.times[1] - job.times[0] for job in late)
    return [median(gaps), max(gaps), to_first, to_second, sum(len(job.tokens) for job in jobs) / seconds]
