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
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import numpy as np

from minisgl.bench.preemption import evict_all
from minisgl.bench.report import Report
from minisgl.bench.workloads import free_memory, make_engine
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
    done: threading.Event = field(default_factory=threading.Event)


class EngineThread(threading.Thread):
    """Steps one engine. ``max_tokens`` is the most that it generates for a job; ``on_end`` is called when it has."""

    def __init__(self, llm: LLM, max_tokens: int | None = None, on_end: Callable[[Job], None] | None = None) -> None:
        super().__init__(daemon=True)
        self.error: BaseException | None = None
        self._llm = llm
        self._max_tokens = max_tokens
        self._on_end = on_end
        self._inbox: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._jobs: dict[int, Job] = {}  # by uid of the request
        self._stopped = threading.Event()

    def submit(self, job: Job) -> None:
        """Continue a job, from any thread."""
        self._inbox.put(job)

    def close(self) -> None:
        """End the thread, and raise what has ended it before."""
        self._stopped.set()
        self.join()
        if self.error is not None:
            raise self.error

    def run(self) -> None:
        """Run steps until `close`; an error ends all waiting, because nobody would answer."""
        try:
            while not self._stopped.is_set():
                self._take()
                if self._llm.scheduler.has_work:
                    self._step()
        except BaseException as error:
            self.error = error
            for job in self._jobs.values():
                job.done.set()

    def _take(self) -> None:
        wait = not self._llm.scheduler.has_work
        try:
            while True:
                self._begin(self._inbox.get(wait, _PATIENCE))
                wait = False
        except queue.Empty:
            pass

    def _begin(self, job: Job) -> None:
        left = job.max_tokens - len(job.tokens)
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=min(left, self._max_tokens or left))
        request = self._llm.prepare(job.prompt + job.tokens, params, streaming=True)[0].request
        self._jobs[request.uid] = job
        self._llm.scheduler.add(request)

    def _step(self) -> None:
        output = self._llm.core.step()
        now = time.perf_counter()
        for event in output.events:
            job = self._jobs[event.request.uid]
            job.tokens.append(event.token_id)
            job.times.append(now)
        for request in output.finished:
            job = self._jobs.pop(request.uid)
            if request.error is not None or len(job.tokens) >= job.max_tokens or self._on_end is None:
                job.done.set()
            else:
                self._on_end(job)


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
    second = EngineThread(decode)

    def hand_over(job: Job) -> None:
        evict_all(prefill)
        second.submit(job)

    _serve([EngineThread(prefill, 1, hand_over), second], jobs, enter=1)


def serve_alike(engines: Sequence[LLM], jobs: Sequence[Job]) -> None:
    """Give the jobs to the engines in turn, each of which does everything for its own."""
    _serve([EngineThread(llm) for llm in engines], jobs, enter=len(engines))


def _serve(threads: Sequence[EngineThread], jobs: Sequence[Job], enter: int) -> None:
    """Submit each job when its time has come, to the first ``enter`` threads in turn."""
    for thread in threads:
        thread.start()
    start = time.perf_counter()
    try:
        for number, job in enumerate(sorted(jobs, key=lambda job: job.delay)):
            time.sleep(max(0.0, start + job.delay - time.perf_counter()))
            job.delay = time.perf_counter()  # from now on, when it arrived
            threads[number % enter].submit(job)
        for job in jobs:
            while not job.done.wait(_PATIENCE) and all(thread.error is None for thread in threads):
                pass
    finally:
        for thread in threads:
            thread.close()


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
    columns = ["engines", "largest gap, median ms", "worst gap, ms", "first token of a long prompt, median ms"]
    columns += ["from there to its second, median ms", "tokens/s"]
    title = f"{streams} streams and {requests} prompts of {input_len} tokens, on {devices[0]} and {devices[1]}"
    table = report.table(title, *columns)
    page_size = options.get("page_size", 16)
    tokens = streams * (_STREAM_LEN + output_len) + requests * (input_len + _LATE_OUTPUT)
    sizes: dict[str, Any] = {
        "num_pages": tokens // page_size + streams + requests,
        "max_seq_len": max(input_len, _STREAM_LEN) + output_len,
    }
    cases: dict[str, tuple[str, Callable[[list[LLM], list[Job]], None]]] = {
        "alike, prefill first": ("prefill-first", serve_alike),
        "alike, mixed steps": ("mixed", serve_alike),
        "apart": ("prefill-first", partial(_apart, num_slots=int(sizes["num_pages"]))),
    }
    for label, (policy, serve) in cases.items():
        # Both are built before either runs: captured graphs and allocations of one would disturb the other.
        engines = [make_engine(model, {**sizes, "batch_policy": policy, "device": name, **options}) for name in devices]
        runs = []
        for seed in range(1 + repeat):  # the first compiles what is left to compile
            jobs = _jobs(engines[0], seed, streams, requests, rate, input_len, output_len)
            serve(engines, jobs)
            runs.append(_summary(jobs, streams))
        measured = list(zip(*runs[1:], strict=True))
        report.samples |= {f"{label}, {name}": list(each) for name, each in zip(columns[1:], measured, strict=True)}
        table.add(label, *map(median, measured))
        del engines
        free_memory()
    return report


def _apart(engines: Sequence[LLM], jobs: Sequence[Job], num_slots: int) -> None:
    serve_apart(engines[0], engines[1], jobs, num_slots)


def _jobs(llm: LLM, seed: int, streams: int, requests: int, rate: float, input_len: int, output_len: int) -> list[Job]:
    """The streams first, which all arrive at once."""
    rng = np.random.default_rng(seed)

    def prompt(length: int) -> list[int]:
        ids: list[int] = rng.integers(llm.model_config.vocab_size, size=length).tolist()
        return ids

    late = [Job(prompt(input_len), _LATE_OUTPUT, delay=(1 + number) / rate) for number in range(requests)]
    return [Job(prompt(_STREAM_LEN), output_len) for _ in range(streams)] + late


def _summary(jobs: Sequence[Job], streams: int) -> list[float]:
    gaps = [1e3 * float(np.diff(job.times).max()) for job in jobs[:streams]]
    late = jobs[streams:]
    seconds = max(job.times[-1] for job in jobs) - min(job.delay for job in jobs)
    return [
        median(gaps),
        max(gaps),
        1e3 * median(job.times[0] - job.delay for job in late),
        1e3 * median(job.times[1] - job.times[0] for job in late),
        sum(len(job.tokens) for job in jobs) / seconds,
    ]
