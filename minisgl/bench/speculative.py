"""Speculative decoding: what drafts bring that are right with a given probability, and prompt lookup on a real task."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import torch

from minisgl.batch import Batch, StepPhase
from minisgl.bench.host import SimulatedDevice, add_request
from minisgl.bench.report import Report, Table, spread
from minisgl.bench.workloads import make_engine
from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.kvcache.radix import RadixCache
from minisgl.llm import LLM
from minisgl.models.decoder import CausalLM
from minisgl.request import Int32Array, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler
from minisgl.scheduler.speculation import DraftStats, Speculation
from minisgl.table import RunningTable
from minisgl.trace import observed

_PROMPT_LEN, _OUTPUT_LEN = 128, 256
_NONE = "none"
_SPEED_LIMITS = {(0.0, 1): 0.96, (0.8, 1): 2.6, (0.8, 64): 1.0}
"""Of tokens a second, × without drafts, by the chance of a draft and the number of requests."""
_KINDS = {False: "plain step", True: "step that verifies"}
"""What a step is, by whether it verifies."""


class RightWithChance:
    """Drafts ``token``, which `_always_say_zero` makes the right one, and with a probability another instead."""

    chance: float = 1.0
    token: int = 0

    def __init__(self, target: DraftTarget | None = None) -> None:
        self._random = np.random.default_rng(0)

    def propose(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        return [self.token ^ (self._random.random(row.count) >= self.chance).astype(np.int32) for row in rows]

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Forget nothing, as nothing is kept."""


@torch.inference_mode()
def _always_say_zero(llm: LLM) -> None:
    """Let all logits be 0, of which the first token's is the greatest.

    Every kernel takes the time it always takes, and in bfloat16 too a draft is right or wrong whatever the batch.
    """
    cast(CausalLM, llm.engine.model).model.norm.weight.zero_()


def run_speculative(
    model: str = "Qwen3-14B",
    options: Mapping[str, Any] = {},
    running: Sequence[int] = (1, 8, 64),
    chances: Sequence[float] = (0.0, 0.8),
    draft_tokens: int = 4,
    costs: Sequence[int] = (1, 2, 4, 8, 16),
    repeat: int = 3,
    edit: bool = False,
) -> Report:
    """Tokens a second with drafts over those without, and what a step that verifies costs; or what ``ngram`` brings."""
    report = Report("speculative")
    if edit:
        return _run_edit(report, model, options, draft_tokens, repeat)
    columns = ("drafts", "requests", "tokens/s", "least", "most", "× without", "accepted a step", "verified a token")
    table = report.table(f"{model}, {draft_tokens} drafts, {_PROMPT_LEN} in, {_OUTPUT_LEN} out", *columns)
    title = f"{model}: one step, of which all drafts are right"
    steps = report.table(title, "requests", "drafts a row", "ms", "least", "most", "× plain")
    engine = {"max_running_requests": max(running), "max_seq_len": 1024, **options}
    drafter = f"{RightWithChance.__module__}:{RightWithChance.__qualname__}"
    base: dict[int, float] = {}  # tokens a second without drafts, by number of requests
    plain: dict[int, float] = {}  # seconds of a step without drafts
    for chance, drafts in [(1.0, 0), *((chance, draft_tokens) for chance in chances), *((1.0, each) for each in costs)]:
        RightWithChance.chance = chance
        how = {"drafter": drafter, "num_draft_tokens": drafts} if drafts else {}
        with make_engine(model, {**engine, **how}) as llm:
            _always_say_zero(llm)
            for count in running:
                stats = DraftStats()
                if llm.scheduler.speculation is not None:
                    llm.scheduler.speculation.stats = stats
                name = f"right with {chance:g}" if chance < 1.0 else f"{drafts} right ones" if drafts else _NONE
                speeds, periods = _measure(report, llm, count, name, repeat)
                if drafts == 0:
                    base[count], plain[count] = statistics.median(speeds), statistics.median(periods[False])
                if chance == 1.0:
                    _add_step(report, steps, count, drafts, periods[drafts > 0], plain[count])
                if chance < 1.0 or drafts == 0:
                    ratio, accepted = (
                        statistics.median(speeds) / base[count],
                        stats.accepted / max(stats.verifications, 1),
                    )
                    verified = stats.drafted / ((repeat + 1) * count * _OUTPUT_LEN)
                    table.add(name, count, *spread(speeds), ratio, accepted, verified)
                    if limit := _SPEED_LIMITS.get((chance, count)):
                        title = f"tokens/s × without drafts, {count} at a time, right with {chance:g}"
                        report.target(title, ratio, limit, at_least=True)
    return report


def _add_step(report: Report, steps: Table, count: int, drafts: int, periods: Sequence[float], plain: float) -> None:
    """Add what a step takes, in milliseconds and in plain steps, if two of its kind have followed each other."""
    if not periods:
        steps.add(count, drafts, *["–"] * 4)
        return
    cost = statistics.median(periods) / plain
    steps.add(count, drafts, *(1e3 * each for each in spread(periods)), cost)
    if (count, drafts) == (1, 4):
        report.target("step of 1 request with 4 drafts × plain", cost, 1.12, at_least=False)


class _StepPeriods:
    """A `StepObserver` that measures from the end of a step to the end of the next, of steps that decode alone."""

    def __init__(self) -> None:
        self.seconds: dict[bool, list[float]] = {False: [], True: []}  # by whether the step verifies
        self._last: tuple[object, float] = None, 0.0

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        """Do nothing: the end of the step before is where a step begins."""

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        """Count a step with the same rows as the one before, and drafts if that one had some."""
        if phase != "process" or batch is None:
            return
        verifies, now = len(batch.drafts) > 0, time.perf_counter()
        kind = None if batch.num_tokens > len(batch.sample_rows) else (batch.num_rows, verifies)
        if kind is not None and kind == self._last[0]:
            self.seconds[verifies].append(now - self._last[1])
        self._last = kind, now

    def finish(self, requests: Sequence[Request]) -> None:
        """Do nothing."""


def _measure(
    report: Report, llm: LLM, count: int, name: str, repeat: int
) -> tuple[list[float], dict[bool, list[float]]]:
    """Measure ``repeat`` runs with the same prompts, behind an uncounted one.

    Returns:
        Tokens a second of each run; and by whether steps verify, their median seconds in each run that had some.
    """
    rng = np.random.default_rng(count)
    prompts = rng.integers(0, llm.model_config.vocab_size, (count, _PROMPT_LEN)).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=_OUTPUT_LEN, ignore_eos=True)
    speeds, periods = list[float](), {kind: list[float]() for kind in _KINDS}
    for run in range(repeat + 1):
        watch = _StepPeriods()
        with observed(watch, llm.loop.observers):
            start = time.perf_counter()
            outputs = llm.generate(prompts, params)
            speeds.append(count * _OUTPUT_LEN / (time.perf_counter() - start))
        for kind, seconds in watch.seconds.items():
            if run and seconds:
                periods[kind].append(statistics.median(seconds))
        if any(any(output.token_ids) for output in outputs):
            raise AssertionError("the model has said something else than token 0")
    report.samples[f"{name}, {count} at a time, tokens/s"] = speeds[1:]
    for kind, words in _KINDS.items():
        if periods[kind]:
            report.samples[f"{name}, {count} at a time, s a {words}"] = periods[kind]
    return speeds[1:], periods


def simulate(count: int, chance: float, cost: Callable[[int], float], draft_tokens: int = 4, rounds: int = 4) -> float:
    """Tokens a second of ``count`` requests at once, × without drafts, by the engine's scheduler and no device.

    A step that decodes takes one unit of time, and ``cost(rows)`` units if it verifies. Drafts are right with
    probability ``chance``.
    """

    def units(batch: Batch) -> float:
        if batch.num_tokens > len(batch.sample_rows):
            return 0.0
        return cost(batch.num_rows) if len(batch.drafts) else 1.0

    device = SimulatedDevice(units)
    table, page_size = RunningTable(count, _PROMPT_LEN + _OUTPUT_LEN), 16
    num_pages = count * -(-table.tokens.shape[1] // page_size)
    memory = KVMemory(num_pages, table, RadixCache(page_size), num_draft_tokens=draft_tokens)
    drafter = RightWithChance()
    drafter.chance, drafter.token = chance, 1  # the one that the device says
    speculation = Speculation(table, drafter, draft_tokens, vocab_size=2, clock=lambda: device.now)
    scheduler = Scheduler(table, memory, Policies(), speculation=speculation)
    loop = EngineLoop(scheduler, device)
    for uid in range(rounds * count):
        add_request(loop, uid, np.full(_PROMPT_LEN, uid, dtype=np.int32), _OUTPUT_LEN, watched=False)
        if (uid + 1) % count == 0:
            while scheduler.has_work:
                loop.step()
    speculation.close()
    return rounds * (_OUTPUT_LEN - 1) / device.now


_TEXT = '''def area(width, height):
    """Return the area of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return width * height


def perimeter(width, height):
    """Return the perimeter of a rectangle."""
    if width < 0 or height < 0:
        raise ValueError("width and height must not be negative")
    return 2 * (width + height)
'''
_TASKS = (
    "Repeat this code, but rename the function area to surface:",
    "Write this code again, and change nothing but the word rectangle, which becomes box:",
    "Repeat this code with a comment above each function:",
)


def _run_edit(report: Report, model: str, options: Mapping[str, Any], draft_tokens: int, repeat: int) -> Report:
    table = report.table(
        f"{model} edits a text, one request at a time", "drafter", "tokens/s", "least", "most", "× without"
    )
    params = SamplingParams(temperature=0.0, max_tokens=160)
    speeds: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    for drafter in (_NONE, "ngram", "suffix"):
        engine = {"max_running_requests": 1, "drafter": drafter, "num_draft_tokens": draft_tokens, **options}
        with make_engine(model, {"num_pages": 256, "prefix_cache": "none", **engine}) as llm:
            chats = [[{"role": "user", "content": f"{task}\n\n{_TEXT}"}] for task in _TASKS]
            prompts = [llm.tokenizer.encode_chat(chat) for chat in chats]
            runs = [llm.generate(prompts, params) for _ in range(repeat)]
        answers[drafter] = [output.token_ids for output in runs[-1]]
        if answers[drafter] != answers[_NONE]:
            raise AssertionError(f"{drafter} has changed an answer")
        counts = [len(tokens) - 1 for tokens in answers[drafter]]
        seconds = [sum(each.metrics.tpot * count for each, count in zip(run, counts, strict=True)) for run in runs]
        rates = report.samples[f"{drafter}, tokens/s"] = [sum(counts) / each for each in seconds]
        speeds[drafter] = statistics.median(rates)
        table.add(drafter, *spread(rates), speeds[drafter] / speeds[_NONE])
    report.target("ngram, tokens/s × without", speeds["ngram"] / speeds[_NONE], 1.8, at_least=True)
    return report
