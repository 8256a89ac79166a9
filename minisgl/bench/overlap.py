"""What overlap buys: the same decode steps with the host's work between them, and with that work hidden behind them."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import chain
from statistics import median
from typing import Any, cast

from minisgl.batch import Batch
from minisgl.bench.host import WARM_UP_STEPS, decode_seconds, prefill_all
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.workloads import make_engine
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.scheduler import Scheduler
from minisgl.trace import DEVICE, Trace, recorded

_ON_OFF = {False: "off", True: "on"}
_PHASES = ("schedule", "launch", "wait", "process")
_INPUT_LEN = 32
_SPARE_STEPS = 8  # tokens left to generate after the last timed step, so that no request ends before it
_REPEATS = 3
_EXCERPT_STEPS = 8


def run_overlap(
    model: str = "Qwen3-0.6B",
    options: Mapping[str, Any] = {},
    rows: Sequence[int] = (16, 256),
    steps: int = 100,
    added: Sequence[float] = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0),
) -> Report:
    """Decode steps of one engine with and without overlap: by number of rows, and with a host that is made slower.

    ``device`` is how long the device takes for a step that it finds waiting, so it is measured with overlap. All times
    are medians over the steps. The report has traces of a few steps of the most rows.
    """
    llm = make_engine(model, options)
    rng = random.Random(0)
    measured: list[list[Cell]] = []
    phases: list[list[Cell]] = []
    targets: list[Target] = []
    for count in rows:
        repeats = {on: [_decode(llm, rng, on, count, steps) for _ in range(_REPEATS)] for on in _ON_OFF}
        seconds = {on: median(chain.from_iterable(runs)) for on, runs in repeats.items()}
        recordings = {on: Trace(llm.engine.device) for on in _ON_OFF}
        for on, trace in recordings.items():
            _decode(llm, rng, on, count, steps, trace=trace)
            phases.append([count, _ON_OFF[on], *_host_times(trace)])
        device = median(event.end - event.start for event in recordings[True].events if event.track == DEVICE)
        for on, step in seconds.items():
            idle = 100 * max(1 - device / step, 0.0)
            measured.append([count, _ON_OFF[on], 1e3 * step, count / step, 1e3 * device, idle])
        if llm.engine.device.type == "cuda":
            host = 1e3 * recordings[True].summary().host_median
            targets.append(Target(f"host time a step of {count} rows, ms", host, 1.0, at_least=False))
    traces = {_ON_OFF[on]: trace.excerpt(steps // 2, _EXCERPT_STEPS) for on, trace in recordings.items()}
    most = rows[-1]
    slower: list[list[Cell]] = [
        [ms, *(1e3 * median(_decode(llm, rng, on, most, steps, added=ms)) for on in _ON_OFF)] for ms in added
    ]
    columns = ["rows", "overlap", "ms a step", "tokens/s", "device, ms", "device idle, %"]
    tables = [
        Table("decode steps", columns, measured),
        Table("what the host does in a step, ms", ["rows", "overlap", *_PHASES], phases),
        Table(f"{most} rows and a slower host, ms a step", ["added to the host", "overlap off", "on"], slower),
    ]
    return Report("overlap", {"input_len": _INPUT_LEN}, tables, targets, traces=traces)


def _decode(
    llm: LLM, rng: random.Random, overlap: bool, rows: int, steps: int, added: float = 0.0, trace: Trace | None = None
) -> list[float]:
    """Seconds from the end of each timed step to the end of the next; all decode ``rows`` requests with new prompts."""
    scheduler = cast(Scheduler, _SlowScheduler(llm.scheduler, added / 1e3)) if added else llm.scheduler
    loop = EngineLoop(scheduler, llm.engine, depth=int(overlap))
    output_len = WARM_UP_STEPS + steps + _SPARE_STEPS
    params = SamplingParams(temperature=0.6, max_tokens=output_len, ignore_eos=True)
    for _ in range(rows):
        prompt = [rng.randint(0, llm.model_config.vocab_size - 1) for _ in range(_INPUT_LEN)]
        llm.scheduler.add(llm.prepare(prompt, params)[0].request)
    prefill_all(loop)
    with nullcontext() if trace is None else recorded(trace, loop, llm.engine):
        seconds = decode_seconds(loop, rows, steps)
    while llm.scheduler.has_work:
        loop.step()
    return seconds


def _host_times(trace: Trace) -> list[float]:
    """Median milliseconds of each of the host's phases."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        times[event.name].append(1e3 * (event.end - event.start))
    return [median(times[phase]) for phase in _PHASES]


class _SlowScheduler:
    """A scheduler whose `schedule` takes ``seconds`` longer."""

    def __init__(self, scheduler: Scheduler, seconds: float) -> None:
        self._scheduler = scheduler
        self._seconds = seconds

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def schedule(self) -> Batch | None:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._scheduler.schedule()
