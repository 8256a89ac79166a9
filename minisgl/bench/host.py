"""What a step costs the host: the real scheduler, page tables and radix cache around a model that computes nothing."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.core import Batch, Request, RunningTable, SamplingParams
from minisgl.core.batch import PendingStep, StepResult
from minisgl.core.request import Int32Array
from minisgl.kvcache.radix import RadixCache
from minisgl.scheduler import EngineLoop, KVMemory, Policies, Scheduler

_KINDS = ("unwatched", "watched")
"""Watched requests report every token, as streams and stop strings need; of the others only the end is reported."""
_VOCAB = 50_000
_SUFFIX_LEN = 64
"""Own tokens of a request behind the shared prefix."""
_PROMPT_LENS = (32, 96)
"""Range of the decoding requests' prompts: unequal, so that they need new pages at different steps, as real ones do."""
_FILLING_STEPS = 64
"""Decode steps that may run before the last request is prefilled."""
_WARM_UP_STEPS = 16
_PREFILL_ROUNDS = 11


@dataclass(frozen=True, slots=True)
class HostWorkload:
    """What is run.

    Args:
        running: numbers of running requests, ascending.
        steps: decode steps that are timed for each.
        prefix_len: tokens of the prefix that prefilled requests share.
        page_size: tokens a page.
    """

    running: tuple[int, ...] = (256, 512, 1024, 2048)
    steps: int = 300
    prefix_len: int = 2048
    page_size: int = 16


@dataclass(frozen=True, slots=True)
class _Done:
    """A step that was never begun: token 1 for every sampling row."""

    rows: int

    def wait(self) -> StepResult:
        return StepResult(np.ones(self.rows, dtype=np.int32))


class NullExecutor:
    """An `Executor` whose steps are done at once."""

    def launch(self, batch: Batch) -> PendingStep:
        return _Done(len(batch.sample_rows))


def run_host(workload: HostWorkload) -> Report:
    """Host time of decode steps by number of running requests, and of prefill by request."""
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for kind in _KINDS:
        steps = [_decode_micros(workload, running, kind == "watched") for running in workload.running]
        medians = [statistics.median(micros) for micros in steps]
        for running, median, micros in zip(workload.running, medians, steps, strict=True):
            rows.append([kind, running, median, float(np.percentile(micros, 95))])
        targets += _targets(kind, workload.running, medians)
    prefill: list[list[Cell]] = [[requests, _prefill_micros(workload, requests)] for requests in (1, 64)]
    prompt = f"{workload.prefix_len} cached tokens and {_SUFFIX_LEN} more"
    return Report(
        "host",
        asdict(workload),
        [
            Table("host time of a decode step", ["requests", "running", "median, µs", "95th percentile, µs"], rows),
            Table(f"host time of a prefill, {prompt}", ["requests at once", "µs a request"], prefill),
        ],
        targets,
    )


def _targets(kind: str, running: tuple[int, ...], medians: list[float]) -> list[Target]:
    few, many, growth = running[0], running[-1], medians[-1] / medians[0]
    return [
        Target(f"decode step of {few} {kind} requests, ms", medians[0] / 1e3, 1.0, at_least=False),
        Target(f"growth from {few} to {many} {kind} requests, ×", growth, many / few, at_least=False),
    ]


def _decode_micros(workload: HostWorkload, running: int, watched: bool) -> list[float]:
    """Microseconds of each timed step: schedule, launch nothing, account for the tokens, collect what became known."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*_PROMPT_LENS, size=running)
    output_len = _FILLING_STEPS + _WARM_UP_STEPS + workload.steps
    loop = _loop(running, _PROMPT_LENS[1] + output_len, workload.page_size)
    for uid, length in enumerate(lengths.tolist()):
        prompt = rng.integers(_VOCAB, size=length, dtype=np.int32)
        loop.scheduler.add(_request(uid, prompt, output_len, watched))
    while len(loop.scheduler.waiting):
        loop.step()
    for _ in range(_WARM_UP_STEPS):
        loop.step()
    micros: list[float] = []
    for _ in range(workload.steps):
        start = time.perf_counter()
        output = loop.step()
        micros.append((time.perf_counter() - start) * 1e6)
        if (output.prefill_tokens, output.decode_tokens) != (0, running):
            raise AssertionError(f"not a decode step of {running} requests")
    return micros


def _prefill_micros(workload: HostWorkload, requests: int) -> float:
    """Microseconds a request from the queue to its first token, when all share a cached prefix. Median of rounds."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(_VOCAB, size=workload.prefix_len, dtype=np.int32)
    loop = _loop(requests, workload.prefix_len + _SUFFIX_LEN + 1, workload.page_size)
    micros: list[float] = []
    for first_uid in range(0, _PREFILL_ROUNDS * requests, requests):
        suffixes = rng.integers(_VOCAB, size=(requests, _SUFFIX_LEN), dtype=np.int32)
        prompts = [np.concatenate([prefix, suffix]) for suffix in suffixes]
        start = time.perf_counter()
        for uid, prompt in enumerate(prompts, first_uid):
            loop.scheduler.add(_request(uid, prompt, 1, watched=False))
        while loop.scheduler.has_work:
            loop.step()
        micros.append((time.perf_counter() - start) / requests * 1e6)
    return statistics.median(micros[1:])  # in the first round nothing is cached


def _loop(max_running: int, max_seq_len: int, page_size: int) -> EngineLoop:
    """A loop with twice the pages that all slots need: nothing is preempted, and the cache has room."""
    table = RunningTable(max_running, max_seq_len)
    num_pages = 2 * max_running * -(-max_seq_len // page_size)
    memory = KVMemory(num_pages, table, RadixCache(page_size))
    return EngineLoop(Scheduler(table, memory, Policies()), NullExecutor())


def _request(uid: int, prompt: Int32Array, output_len: int, watched: bool) -> Request:
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    return Request(uid, prompt, params, max_len=len(prompt) + output_len, watched=watched)
