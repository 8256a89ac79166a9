"""What overlap buys: the same decode steps with the host's work between them, and with that work hidden behind them."""

from __future__ import annotations

import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from statistics import median
from typing import Any, cast

from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.shapes import model_dir
from minisgl.core.batch import Batch, StepResult
from minisgl.core.request import Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.llm import LLM
from minisgl.scheduler import EngineLoop, Scheduler, StepOutput
from minisgl.trace import DEVICE, Trace, recorded

_ON_OFF = {False: "off", True: "on"}
_PHASES = ("schedule", "launch", "wait", "process")
_INPUT_LEN = 32
_WARM_UP_STEPS = 16
_SPARE_STEPS = 8
"""Tokens left to generate when the last timed step is over, so that no request ends before it."""
_REPEATS = 3
_EXCERPT_STEPS = 8


@dataclass(frozen=True, slots=True)
class OverlapWorkload:
    """What is run.

    Args:
        rows: numbers of running requests, ascending.
        steps: decode steps that are timed for each, at the same lengths with and without overlap.
        added: milliseconds by which the host's work on a step is made longer, with the most rows.
    """

    rows: tuple[int, ...] = (16, 256)
    steps: int = 100
    added: tuple[float, ...] = (0.0, 0.5, 1.0, 2.0, 4.0, 16.0)


def run_overlap(model: str, workload: OverlapWorkload, options: Mapping[str, Any]) -> Report:
    """Decode steps of one engine under both loops: by number of rows, and with a host that is made slower.

    ``device`` is how long the device takes for a step that it finds waiting, so it is measured with overlap. All times
    are medians over the steps. The report has traces of a few steps of the most rows.

    Args:
        model: a name from `SHAPES`, or what `minisgl.LLM` takes.
        workload: sizes.
        options: of `minisgl.LLM`.
    """
    with tempfile.TemporaryDirectory() as root:
        llm = make_engine(model_dir(model, Path(root)), model, options)
    decoding = _Decoding(llm, workload.steps)
    measured: list[list[Cell]] = []
    phases: list[list[Cell]] = []
    targets: list[Target] = []
    for rows in workload.rows:
        repeats = {overlap: [decoding.run(overlap, rows) for _ in range(_REPEATS)] for overlap in _ON_OFF}
        seconds = {overlap: median(chain.from_iterable(runs)) for overlap, runs in repeats.items()}
        recordings = {overlap: Trace(llm.engine.device) for overlap in _ON_OFF}
        for overlap, trace in recordings.items():
            decoding.run(overlap, rows, trace=trace)
            phases.append([rows, _ON_OFF[overlap], *_host_times(trace)])
        device = median(event.end - event.start for event in recordings[True].events if event.track == DEVICE)
        for overlap, step in seconds.items():
            idle = 100 * max(1 - device / step, 0.0)
            measured.append([rows, _ON_OFF[overlap], 1e3 * step, rows / step, 1e3 * device, idle])
        if llm.engine.device.type == "cuda":
            host = 1e3 * recordings[True].summary().host_median
            targets.append(Target(f"host time a step of {rows} rows, ms", host, 1.0, at_least=False))
    traces = {_ON_OFF[on]: trace.excerpt(workload.steps // 2, _EXCERPT_STEPS) for on, trace in recordings.items()}
    most = workload.rows[-1]
    slower: list[list[Cell]] = [
        [added, *(1e3 * median(decoding.run(overlap, most, added)) for overlap in _ON_OFF)] for added in workload.added
    ]
    columns = ["rows", "overlap", "ms a step", "tokens/s", "device, ms", "device idle, %"]
    settings = {"model": model, "options": dict(options), "input_len": _INPUT_LEN, **asdict(workload)}
    tables = [
        Table("decode steps", columns, measured),
        Table("what the host does in a step, ms", ["rows", "overlap", *_PHASES], phases),
        Table(f"{most} rows and a slower host, ms a step", ["added to the host", "overlap off", "on"], slower),
    ]
    return Report("overlap", settings, tables, targets, traces=traces)


class _Decoding:
    """Runs decode steps of one engine under either loop.

    Args:
        llm: idle between two runs.
        steps: that are timed in a run.
    """

    def __init__(self, llm: LLM, steps: int) -> None:
        self._llm = llm
        self._steps = steps
        self._rng = random.Random(0)

    def run(self, overlap: bool, rows: int, added: float = 0.0, trace: Trace | None = None) -> list[float]:
        """Seconds from the end of each timed step to the end of the next; all decode ``rows`` requests.

        Args:
            overlap: whether a step stays in flight.
            rows: requests, each with a new prompt.
            added: milliseconds more for the host in every step.
            trace: records the timed steps.
        """
        llm = self._llm
        scheduler = cast(Scheduler, _SlowScheduler(llm.scheduler, added / 1e3)) if added else llm.scheduler
        loop = EngineLoop(scheduler, llm.engine, depth=int(overlap))
        for _ in range(rows):
            llm.scheduler.add(self._request())
        while len(llm.scheduler.waiting):
            loop.step()
        for _ in range(_WARM_UP_STEPS):
            loop.step()
        seconds: list[float] = []
        with nullcontext() if trace is None else recorded(trace, loop, llm.engine):
            for _ in range(self._steps):
                start = time.perf_counter()
                output = loop.step()
                seconds.append(time.perf_counter() - start)
                if (output.prefill_tokens, output.decode_tokens) != (0, rows):
                    raise AssertionError(f"not a decode step of {rows} requests")
        while llm.scheduler.has_work:
            loop.step()
        return seconds

    def _request(self) -> Request:
        highest = self._llm.model_config.vocab_size - 1
        prompt = [self._rng.randint(0, highest) for _ in range(_INPUT_LEN)]
        output_len = _WARM_UP_STEPS + self._steps + _SPARE_STEPS
        params = SamplingParams(temperature=0.6, max_tokens=output_len, ignore_eos=True)
        return self._llm.prepare(prompt, params)[0].request


def _host_times(trace: Trace) -> list[float]:
    """Median milliseconds of each of the host's phases."""
    times: defaultdict[str, list[float]] = defaultdict(list)
    for event in trace.events:
        times[event.name].append(1e3 * (event.end - event.start))
    return [median(times[phase]) for phase in _PHASES]


class _SlowScheduler:
    """What a loop calls of a scheduler, and some work before each step that is of no use.

    Args:
        scheduler: does all else.
        seconds: that `schedule` takes longer.
    """

    def __init__(self, scheduler: Scheduler, seconds: float) -> None:
        self._scheduler = scheduler
        self._seconds = seconds

    def schedule(self) -> Batch | None:
        end = time.perf_counter() + self._seconds
        while time.perf_counter() < end:
            pass
        return self._scheduler.schedule()

    def process(self, batch: Batch, result: StepResult) -> None:
        self._scheduler.process(batch, result)

    def fail(self, batch: Batch, error: str) -> None:
        self._scheduler.fail(batch, error)

    def take_output(self) -> StepOutput:
        return self._scheduler.take_output()
