"""What a step costs the host: the real scheduler around a model that computes nothing, and the way to the ranks."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from statistics import median
from typing import IO, Any, NamedTuple

import numpy as np

from minisgl.batch import Batch, NewRequest, PendingStep, StepLauncher, StepObserver, StepPhase, StepResult, build_batch
from minisgl.bench.report import Report, Table, Target
from minisgl.bench.workloads import make_engine
from minisgl.distributed.control_plane import CONTROL_PLANES
from minisgl.distributed.messages import Endpoint, decode_batch, encode_batch
from minisgl.kvcache.radix import RadixCache
from minisgl.llm import LLM
from minisgl.registry import resolve
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler
from minisgl.table import RunningTable
from minisgl.trace import DEVICE, Trace, TraceObserver, observed

_VOCAB = 50_000
_SUFFIX_LEN = 64  # own tokens of a request behind the shared prefix
_PROMPT_LENS = (32, 96)  # unequal, so that decoding requests need new pages at different steps, as real ones do
_FILLING_STEPS = 64  # decode steps that may run before the last request is prefilled
_WARM_UP_STEPS = 16
_PREFILL_ROUNDS = 11
_ON_OFF = {False: "off", True: "on"}
_PHASES: tuple[StepPhase, ...] = ("schedule", "launch", "wait", "process")
_INPUT_LEN = 32
_SPARE_STEPS = 8  # tokens left to generate after the last timed step, so that no request ends before it
_REPEATS = 3
_EXCERPT_STEPS = 8

STEPS = {
    "decode": "256 rows in decode, 16 of them with a new page",
    "prefill": "8 prompts of 1,024 tokens that are admitted",
}
_PAUSE = 0.003  # seconds between two steps: by then a rank that waits is asleep, as in a server at rest
_TIMEOUT = 60.0
_WARM_UP_MESSAGES = 20


class _Done(NamedTuple):
    """A step that is over before it begins, with token 1 for every sampling row."""

    rows: int

    def wait(self) -> StepResult:
        return StepResult(np.ones(self.rows, dtype=np.int32))


class NullExecutor:
    """An `Executor` whose steps are done at once."""

    def launch(self, batch: Batch) -> PendingStep:
        return _Done(len(batch.sample_rows))


class SimulatedDevice(NullExecutor):
    """An `Executor` that computes nothing, and moves the clock ``now`` forward by ``seconds(batch)`` for each step."""

    def __init__(self, seconds: Callable[[Batch], float]) -> None:
        self.seconds = seconds
        self.now = 0.0

    def launch(self, batch: Batch) -> PendingStep:
        self.now += self.seconds(batch)
        return super().launch(batch)


def run_host(
    running: Sequence[int] = (256, 512, 1024, 2048), steps: int = 300, prefix_len: int = 2048, page_size: int = 16
) -> Report:
    """Host time of decode steps by running requests, watched (each token is reported) or not, and of prefill."""
    report = Report("host")
    decode = report.table("host time of a decode step", "requests", "running", "median, µs", "95th percentile, µs")
    for kind in ("unwatched", "watched"):
        medians = []
        for count in running:
            micros = _decode_micros(count, steps, page_size, kind == "watched")
            medians.append(median(micros))
            decode.add(kind, count, medians[-1], float(np.percentile(micros, 95)))
        few, many, growth = running[0], running[-1], medians[-1] / medians[0]
        title = f"growth from {few} to {many} {kind} requests, ×"
        step = Target(f"decode step of {few} {kind} requests, ms", medians[0] / 1e3, 1.0, at_least=False)
        report.targets += [step, Target(title, growth, many / few, at_least=False)]
    prompt = f"{prefix_len} cached tokens and {_SUFFIX_LEN} more"
    prefill = report.table(f"host time of a prefill, {prompt}", "requests at once", "µs a request")
    for count in (1, 64):
        prefill.add(count, _prefill_micros(count, prefix_len, page_size))
    columns = ("running", "pages a step", "kept back, µs a step", "published, µs a step", "µs a page")
    published = report.table("pages that running answers fill, published in the prefix cache", *columns)
    for count in running:
        pages = count / page_size
        repeats = [
            [median(_decode_micros(count, steps, page_size, False, kind)) for kind in (_KeepsAnswersBack, KVMemory)]
            for _ in range(_REPEATS)  # in turn, since they differ by little
        ]
        without, added = median(kept for kept, _ in repeats), median(more - kept for kept, more in repeats)
        published.add(count, pages, without, without + added, added / pages)
    return report


class _KeepsAnswersBack(KVMemory):
    """Pages that answers fill reach the prefix cache when their requests end."""

    def cache_answers(self, slots: Int32Array) -> None: ...


def _decode_micros(
    count: int, steps: int, page_size: int, watched: bool, memory: type[KVMemory] = KVMemory
) -> list[float]:
    """Microseconds of decode steps of ``count`` requests with prompts of their own."""
    output_len = _FILLING_STEPS + _WARM_UP_STEPS + steps
    loop = _loop(count, _PROMPT_LENS[1] + output_len, page_size, memory)
    rng = np.random.default_rng(0)
    for uid, length in enumerate(rng.integers(*_PROMPT_LENS, size=count).tolist()):
        add_request(loop, uid, rng.integers(_VOCAB, size=length, dtype=np.int32), output_len, watched)
    return [1e6 * seconds for seconds in _decode_seconds(loop, count, steps, nullcontext())]


def _decode_seconds(loop: EngineLoop, rows: int, steps: int, watched: AbstractContextManager[object]) -> list[float]:
    """Seconds of so many steps, ``watched``, after all ``rows`` requests are prefilled and `_WARM_UP_STEPS` more."""
    while len(loop.scheduler.waiting):
        loop.step()
    for _ in range(_WARM_UP_STEPS):
        loop.step()
    seconds: list[float] = []
    with watched:
        for _ in range(steps):
            start = time.perf_counter()
            output = loop.step()
            seconds.append(time.perf_counter() - start)
            if (output.prefill_tokens, output.decode_tokens) != (0, rows):
                raise AssertionError(f"not a decode step of {rows} requests")
    return seconds


def _prefill_micros(requests: int, prefix_len: int, page_size: int) -> float:
    """Median microseconds a request, from the queue to its first token, when all share a cached prefix."""
    rng = np.random.default_rng(0)
    prefix = rng.integers(_VOCAB, size=prefix_len, dtype=np.int32)
    loop = _loop(requests, prefix_len + _SUFFIX_LEN + 1, page_size)
    micros: list[float] = []
    for first_uid in range(0, _PREFILL_ROUNDS * requests, requests):
        suffixes = rng.integers(_VOCAB, size=(requests, _SUFFIX_LEN), dtype=np.int32)
        prompts = [np.concatenate([prefix, suffix]) for suffix in suffixes]
        start = time.perf_counter()
        for uid, prompt in enumerate(prompts, first_uid):
            add_request(loop, uid, prompt, 1, watched=False)
        while loop.scheduler.has_work:
            loop.step()
        micros.append((time.perf_counter() - start) / requests * 1e6)
    return median(micros[1:])  # in the first round nothing is cached


def _loop(max_running: int, max_seq_len: int, page_size: int, make_memory: type[KVMemory] = KVMemory) -> EngineLoop:
    """A loop with twice the pages that all slots need: nothing is preempted, and the cache has room."""
    table = RunningTable(max_running, max_seq_len)
    num_pages = 2 * max_running * -(-max_seq_len // page_size)
    memory = make_memory(num_pages, table, RadixCache(page_size))
    return EngineLoop(Scheduler(table, memory, Policies()), NullExecutor())


def add_request(loop: EngineLoop, uid: int, prompt: Int32Array, output_len: int, watched: bool) -> None:
    """Enqueue a request for exactly ``output_len`` tokens."""
    params = SamplingParams(max_tokens=output_len, ignore_eos=True)
    loop.scheduler.add(Request(uid, prompt, params, max_len=len(prompt) + output_len, watched=watched))


def run_overlap(
    model: str = "Qwen3-0.6B",
    options: Mapping[str, Any] = {},
    rows: Sequence[int] = (16, 256),
    steps: int = 100,
    added: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0),
) -> Report:
    """Decode steps of one engine with and without overlap: by number of rows, and with a host that is made slower.

    What the host does is timed in the same steps. ``device`` is how long the device takes for a step that it finds
    waiting, so it is measured with overlap, in a run that is traced. All times are medians over the steps. The report
    has traces of a few steps of the most rows.
    """
    llm = make_engine(model, options)
    rng = random.Random(0)
    report = Report("overlap", {"input_len": _INPUT_LEN})
    columns = ("rows", "overlap", "ms a step", "tokens/s", "device, ms", "device idle, %")
    measured = report.table("decode steps", *columns)
    phases = report.table("what the host does in a step, ms", "rows", "overlap", *_PHASES)
    for count in rows:
        hosts = {on: HostTimes() for on in _ON_OFF}
        timed: dict[bool, list[float]] = {on: [] for on in _ON_OFF}
        for _ in range(_REPEATS):  # in turn, since a machine is not equally fast all the time
            for on, host in hosts.items():
                timed[on] += _decode(llm, rng, on, count, steps, observer=host)
        seconds = {on: median(each) for on, each in timed.items()}
        recordings = {on: Trace(llm.engine.device) for on in _ON_OFF}
        for on, trace in recordings.items():
            _decode(llm, rng, on, count, steps, observer=TraceObserver(trace, llm.scheduler.table))
            phases.add(count, _ON_OFF[on], *(1e3 * median(hosts[on].seconds[name]) for name in _PHASES))
        device = median(event.end - event.start for event in recordings[True].events if event.track == DEVICE)
        for on, step in seconds.items():
            idle = 100 * max(1 - device / step, 0.0)
            measured.add(count, _ON_OFF[on], 1e3 * step, count / step, 1e3 * device, idle)
        if llm.engine.device.type == "cuda":
            host_ms = 1e3 * recordings[True].summary().host_median
            report.target(f"host time a step of {count} rows, ms", host_ms, 1.0, at_least=False)
    report.traces.update({_ON_OFF[on]: trace.excerpt(steps // 2, _EXCERPT_STEPS) for on, trace in recordings.items()})
    title = f"{rows[-1]} rows and a slower host, ms a step"
    slower = report.table(title, "added to the host", "overlap off", "on")
    for ms in added:
        slower.add(ms, *(1e3 * median(_decode(llm, rng, on, rows[-1], steps, added=ms)) for on in _ON_OFF))
    return report


class HostTimes:
    """A `StepObserver` that notes how long each phase of a step takes, and nothing else: a trace costs time, too."""

    def __init__(self) -> None:
        self.seconds: dict[StepPhase, list[float]] = defaultdict(list)
        self._starts: dict[StepPhase, float] = {}

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        self._starts[phase] = time.perf_counter()

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        self.seconds[phase].append(time.perf_counter() - self._starts[phase])

    def finish(self, requests: Sequence[Request]) -> None:
        """Not timed: it belongs to a phase."""


def _decode(
    llm: LLM,
    rng: random.Random,
    overlap: bool,
    rows: int,
    steps: int,
    added: float = 0.0,
    observer: StepObserver | None = None,
) -> list[float]:
    """Seconds from the end of each timed step to the end of the next; all decode ``rows`` requests with new prompts."""
    loop = EngineLoop(llm.scheduler, _SlowExecutor(llm.engine, added / 1e3) if added else llm.engine, int(overlap))
    output_len = _WARM_UP_STEPS + steps + _SPARE_STEPS
    params = SamplingParams(temperature=0.6, max_tokens=output_len, ignore_eos=True)
    for _ in range(rows):
        prompt = [rng.randint(0, llm.model_config.vocab_size - 1) for _ in range(_INPUT_LEN)]
        llm.scheduler.add(llm.prepare(prompt, params)[0].request)
    watched = nullcontext() if observer is None else observed(observer, loop.observers, llm.engine.observers)
    seconds = _decode_seconds(loop, rows, steps, watched)
    while llm.scheduler.has_work:
        loop.step()
    return seconds


class _SlowExecutor:
    """An `Executor` on which the host takes ``seconds`` longer to launch a step."""

    def __init__(self, executor: StepLauncher, seconds: float) -> None:
        self._executor, self._seconds = executor, seconds

    def launch(self, batch: Batch) -> PendingStep:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._executor.launch(batch)


def measure_planes(ranks: Sequence[int], steps: int) -> Table:
    """Microseconds from a step decided (a `Batch` in the driver) to the last rank that holds it, received and decoded.

    A process without a model or a GPU stands for each of the ``ranks``: `listen` waits as `RankWorker` does and tells
    the time where a rank calls `Engine.launch`. Of each kind in `STEPS`, so many ``steps`` are sent.
    """
    columns = ("control plane", "step", "bytes", "ranks", "median", "95 %")
    table = Table("from a step decided to the last rank that can launch it, µs", columns)
    batches = {"decode": decode_batch_of(256), "prefill": prefill_batch_of(8, 1024)}
    for size in ranks:
        for plane in CONTROL_PLANES:
            for kind, taken in _plane_micros(plane, size, batches, steps).items():
                num_bytes = len(encode_batch(batches[kind]))
                table.add(plane, kind, num_bytes, size, median(taken), taken[int(0.95 * len(taken))])
    return table


def _plane_micros(plane: str, size: int, batches: Mapping[str, Batch], steps: int) -> dict[str, list[float]]:
    """Of each batch, by its name: what so many of it took, in ascending order."""
    with ExitStack() as stack:
        driver = resolve("control_plane", plane, CONTROL_PLANES)(size, lambda: None)
        stack.callback(driver.close)
        listeners = [_start_listener(plane, driver.endpoint(rank), stack) for rank in range(size)]
        driver.connect(_TIMEOUT)
        micros: dict[str, list[float]] = {}
        for name, batch in batches.items():
            taken = []
            for _ in range(_WARM_UP_MESSAGES + steps):
                time.sleep(_PAUSE)
                decided = time.monotonic_ns()
                driver.send(encode_batch(batch), _TIMEOUT)
                taken.append((max(int(each.readline()) for each in listeners) - decided) / 1e3)
            micros[name] = sorted(taken[_WARM_UP_MESSAGES:])
    return micros


def _start_listener(plane: str, endpoint: Endpoint, stack: ExitStack) -> IO[bytes]:
    """Start a process that runs `listen`, and ends with the stack. Returns what it prints."""
    code = f"from minisgl.bench.host import Endpoint, listen; listen({plane!r}, {endpoint!r})"
    command = [sys.executable, "-c", code]
    process = stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=endpoint.fds))
    stack.callback(process.kill)
    assert process.stdout is not None
    return process.stdout


def listen(plane: str, endpoint: Endpoint) -> None:
    """Be a rank without a model: print at what time each step could have been launched, in nanoseconds."""
    steps = resolve("control_plane", plane, CONTROL_PLANES).receiver(endpoint)
    while (message := steps.receive()) is not None:
        decode_batch(message)
        print(time.monotonic_ns(), flush=True)


def decode_batch_of(rows: int) -> Batch:
    """A decode step in which every 16th row has got a new page."""
    changed = np.arange(0, rows, 16, dtype=np.int32)
    return _batch(rows, 1, 1000, page_index=changed, page_value=changed)


def prefill_batch_of(rows: int, length: int) -> Batch:
    """A step that admits ``rows`` prompts and feeds all of each."""
    params = SamplingParams(temperature=0.6, max_tokens=512, ignore_eos=True)
    prompt = np.arange(length, dtype=np.int32)
    new_requests = [NewRequest(slot, prompt, length, params, (), seed=slot) for slot in range(rows)]
    pages = np.arange(rows * length // 16, dtype=np.int32)
    return _batch(rows, length, 0, new_requests=new_requests, page_index=pages, page_value=pages)


def _batch(rows: int, fed: int, cached: int, **changes: Any) -> Batch:
    slots = np.arange(rows, dtype=np.int32)
    q_lens, kv_lens = (np.full(rows, length, dtype=np.int32) for length in (fed, cached))
    table = np.zeros((rows, (fed + cached) // 16 + 1), dtype=np.int32)
    return build_batch(slots, q_lens, kv_lens, table, 16, slots, slots, num_decode=rows if cached else 0, **changes)
