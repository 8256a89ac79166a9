"""What a step costs the host: the real scheduler around a model that computes nothing, and the way to the ranks."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec
import numpy as np

from minisgl.batch import Batch, NewRequest, PendingStep, StepResult, build_batch
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.distributed.control_plane import CONTROL_PLANES
from minisgl.distributed.messages import Endpoint, StepReport, decode_batch, encode_batch
from minisgl.distributed.rank_process import ReportReader, send_report
from minisgl.kvcache.radix import RadixCache
from minisgl.registry import resolve
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler
from minisgl.table import RunningTable

_VOCAB = 50_000
_SUFFIX_LEN = 64  # own tokens of a request behind the shared prefix
_PROMPT_LENS = (32, 96)  # unequal, so that decoding requests need new pages at different steps, as real ones do
_FILLING_STEPS = 64  # decode steps that may run before the last request is prefilled
WARM_UP_STEPS = 16
_PREFILL_ROUNDS = 11

STEPS = {
    "decode": "256 rows in decode, 16 of them with a new page",
    "prefill": "8 prompts of 1,024 tokens that are admitted",
}
_PAUSE = 0.003  # seconds between two steps: by then a rank that waits is asleep, as in a server at rest
_TIMEOUT = 60.0
_WARM_UP_MESSAGES = 20


@dataclass(frozen=True, slots=True)
class _Done:
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
    """Host time of decode steps by number of running requests, and of prefill by request.

    Watched requests report every token, as streams and stop strings need; of the others only the end is reported.
    """
    rows: list[list[Cell]] = []
    targets: list[Target] = []
    for kind in ("unwatched", "watched"):
        medians = []
        for count in running:
            micros = _decode_micros(count, steps, page_size, kind == "watched")
            medians.append(statistics.median(micros))
            rows.append([kind, count, medians[-1], float(np.percentile(micros, 95))])
        few, many, growth = running[0], running[-1], medians[-1] / medians[0]
        targets += [
            Target(f"decode step of {few} {kind} requests, ms", medians[0] / 1e3, 1.0, at_least=False),
            Target(f"growth from {few} to {many} {kind} requests, ×", growth, many / few, at_least=False),
        ]
    prefill: list[list[Cell]] = [[requests, _prefill_micros(requests, prefix_len, page_size)] for requests in (1, 64)]
    prompt = f"{prefix_len} cached tokens and {_SUFFIX_LEN} more"
    return Report(
        "host",
        {},
        [
            Table("host time of a decode step", ["requests", "running", "median, µs", "95th percentile, µs"], rows),
            Table(f"host time of a prefill, {prompt}", ["requests at once", "µs a request"], prefill),
        ],
        targets,
    )


def _decode_micros(running: int, steps: int, page_size: int, watched: bool) -> list[float]:
    """Microseconds of each timed step: schedule, launch nothing, account for the tokens, collect what became known."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(*_PROMPT_LENS, size=running)
    output_len = _FILLING_STEPS + WARM_UP_STEPS + steps
    loop = _loop(running, _PROMPT_LENS[1] + output_len, page_size)
    for uid, length in enumerate(lengths.tolist()):
        prompt = rng.integers(_VOCAB, size=length, dtype=np.int32)
        loop.scheduler.add(_request(uid, prompt, output_len, watched))
    prefill_all(loop)
    return [seconds * 1e6 for seconds in decode_seconds(loop, running, steps)]


def prefill_all(loop: EngineLoop) -> None:
    """Run steps until no request waits, and `WARM_UP_STEPS` more."""
    while len(loop.scheduler.waiting):
        loop.step()
    for _ in range(WARM_UP_STEPS):
        loop.step()


def decode_seconds(loop: EngineLoop, rows: int, steps: int) -> list[float]:
    """Seconds that each of so many steps takes; all must decode ``rows`` requests."""
    seconds: list[float] = []
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


class _Listener(msgspec.Struct, frozen=True):
    """What the process that stands for a rank is started with."""

    plane: str
    endpoint: Endpoint
    reports: int


def measure_planes(ranks: Sequence[int], steps: int) -> Table:
    """Microseconds from a step decided (a `Batch` in the driver) to the last rank that holds it, received and decoded.

    A process without a model or a GPU stands for each rank. It waits as `RankWorker` does and takes the time where a
    rank calls `Engine.launch`.

    Args:
        ranks: numbers of ranks.
        steps: that are sent of each kind in `STEPS`.
    """
    rows: list[list[Cell]] = []
    for size in ranks:
        for plane in CONTROL_PLANES:
            for kind, batch in (("decode", decode_batch_of(256)), ("prefill", prefill_batch_of(8, 1024))):
                taken = sorted(_plane_micros(plane, size, batch, steps))
                cells = (statistics.median(taken), taken[int(0.95 * len(taken))])
                rows.append([plane, kind, len(encode_batch(batch)), size, *cells])
    columns = ["control plane", "step", "bytes", "ranks", "median", "95 %"]
    return Table("from a step decided to the last rank that can launch it, µs", columns, rows)


def _plane_micros(plane: str, size: int, batch: Batch, steps: int) -> list[float]:
    with ExitStack() as stack:
        driver = resolve("control_plane", plane, CONTROL_PLANES)(size, lambda: None)
        stack.callback(driver.close)
        readers = [_start_listener(plane, driver.endpoint(rank), stack) for rank in range(size)]
        driver.connect(_TIMEOUT)
        for reader in readers:
            reader.read(_TIMEOUT)
        taken = []
        for _ in range(_WARM_UP_MESSAGES + steps):
            time.sleep(_PAUSE)
            decided = time.monotonic_ns()
            driver.send(encode_batch(batch), _TIMEOUT)
            heard = [reader.read(_TIMEOUT) for reader in readers]
            taken.append((max(each.digest for each in heard if isinstance(each, StepReport)) - decided) / 1e3)
    return taken[_WARM_UP_MESSAGES:]


def _start_listener(plane: str, endpoint: Endpoint, stack: ExitStack) -> ReportReader:
    """Start a process that runs `listen`, and ends with the stack."""
    reports, writer = os.pipe()
    command = [sys.executable, "-c", "from minisgl.bench.host import listen; listen()"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=(writer, *endpoint.fds))
    stack.callback(process.wait)
    stack.callback(process.kill)
    os.close(writer)
    assert process.stdin is not None
    process.stdin.write(msgspec.json.encode(_Listener(plane, endpoint, writer)) + b"\n")
    process.stdin.flush()

    def check() -> None:
        if process.poll() is not None:
            raise RuntimeError(f"a listener has ended with exit code {process.returncode}")

    reader = ReportReader(reports, reports, check)
    stack.callback(reader.close)
    stack.callback(process.stdin.close)
    return reader


def listen() -> None:
    """Be a rank without a model: report at what time each step could have been launched."""
    given = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Listener)
    steps = resolve("control_plane", given.plane, CONTROL_PLANES).receiver(given.endpoint)
    send_report(given.reports, StepReport(-1, b"", None, 0))
    number = 0
    while (message := steps.receive()) is not None:
        decode_batch(message)
        send_report(given.reports, StepReport(number, b"", None, time.monotonic_ns()))
        number += 1


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


def _batch(rows: int, fed: int, cached: int, **changes: object) -> Batch:
    slots = np.arange(rows, dtype=np.int32)
    build: Callable[..., Batch] = build_batch
    return build(
        slots=slots,
        q_lens=np.full(rows, fed, dtype=np.int32),
        kv_lens=np.full(rows, cached, dtype=np.int32),
        page_table=np.zeros((rows, (fed + cached) // 16 + 1), dtype=np.int32),
        page_size=16,
        sample_rows=slots,
        output_index=slots,
        num_decode=rows if cached else 0,
        **changes,
    )
