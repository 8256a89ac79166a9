"""Tensor parallelism: whole workloads over more and more ranks, and what it takes to tell ranks what to do."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from minisgl.bench.control_planes import STEPS, measure_planes
from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload
from minisgl.errors import ConfigError

TARGETS: dict[tuple[str, int, str], float] = {
    ("Qwen3-32B", 4, "mixed"): 9_300,
    ("Qwen3-32B", 4, "bs1"): 6.0,
    ("Qwen3-32B", 4, "prefix"): 0.60,
}
"""What was aimed at on four H200s in bfloat16, in the workload's unit."""


@dataclass(frozen=True, slots=True)
class Case:
    """An engine, and how often each workload runs on it.

    Args:
        model: a name from `SHAPES`, which gets random weights, or what `minisgl.LLM` takes.
        ranks: that share it.
        repeat: runs of each workload, with new prompts; the median counts.
        all_reduce: as in `EngineConfig`: ``"torch"`` between GPUs is NCCL alone. One rank adds up nothing.

    Raises:
        ConfigError: ``ranks`` or ``repeat`` is not a positive integer.
    """

    model: str
    ranks: int
    repeat: int
    all_reduce: str = "auto"

    def __post_init__(self) -> None:
        for name in ("ranks", "repeat"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(f"run: {name} must be an integer of at least 1, got {value!r}")

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Case:
        """From values by name.

        Raises:
            ConfigError: a name is unknown, or one without a default is missing.
        """
        names = [field.name for field in fields(cls)]
        wrong = [name for name in values if name not in names]
        wrong += [name for name in ("model", "ranks", "repeat") if name not in values]
        if wrong:
            raise ConfigError(f"run: {wrong[0]} is unknown or missing; what a run can have is {', '.join(names)}")
        return cls(**values)

    @property
    def title(self) -> str:
        """What tells it from other cases."""
        sums = "" if self.all_reduce == "auto" else f", all_reduce {self.all_reduce}"
        return f"{self.model} over {self.ranks}{sums}"


def run_tp(
    models: Sequence[str],
    ranks: Sequence[int],
    workloads: Sequence[str],
    repeat: int,
    steps: int,
    options: Mapping[str, Any],
) -> Report:
    """Every workload on every model over every number of ranks, and every control plane to as many.

    Args:
        models, repeat: as in `Case`.
        ranks: numbers of ranks.
        workloads, steps, options: as in `run_cases`.
    """
    sums = options.get("all_reduce", "auto")
    cases = [Case(model, size, repeat, sums) for model in models for size in ranks]
    return run_cases(cases, ranks, workloads, steps, options)


def run_cases(
    cases: Sequence[Case], planes: Sequence[int], workloads: Sequence[str], steps: int, options: Mapping[str, Any]
) -> Report:
    """Every workload on every case, and every control plane.

    Args:
        cases: engines.
        planes: numbers of ranks that are told of steps; they need no GPU, and a single one is not told.
        workloads: names from `WORKLOADS`.
        steps: that are sent over each control plane.
        options: of `minisgl.LLM`, in all cases.

    Raises:
        ConfigError: two cases differ in nothing but ``repeat``.
    """
    titles = [case.title for case in cases]
    if len(set(titles)) < len(titles):
        raise ConfigError(f"run: {max(titles, key=titles.count)} is there more than once; give it one repeat")
    samples: dict[str, list[float]] = {}
    medians: dict[tuple[Case, str], float] = {}
    with tempfile.TemporaryDirectory() as root:
        # A single rank is an engine in this process, which then keeps some of the first GPU for itself: it comes last.
        for case in sorted(cases, key=lambda case: -case.ranks):
            for name, values in _measure(model_dir(case.model, Path(root)), case, workloads, options).items():
                samples[f"{case.title}, {name}, {WORKLOADS[name].unit}"] = values
                medians[case, name] = statistics.median(values)
    tables = [_workload_table(cases, workloads, medians), measure_planes([size for size in planes if size > 1], steps)]
    settings = {
        "options": dict(options),
        "runs": [asdict(case) for case in cases],
        "workloads": {**{name: WORKLOADS[name].summary for name in workloads}, **STEPS},
        "steps": steps,
    }
    return Report("tp", settings, tables, _targets(medians), samples)


def _measure(path: str, case: Case, workloads: Sequence[str], options: Mapping[str, Any]) -> dict[str, list[float]]:
    how = {**options, "tensor_parallel_size": case.ranks, "all_reduce": case.all_reduce}
    with make_engine(path, case.model, how) as llm:
        values = {
            name: [run_workload(llm, WORKLOADS[name], seed).value(WORKLOADS[name]) for seed in range(case.repeat)]
            for name in workloads
        }
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return values


def _workload_table(
    cases: Sequence[Case], workloads: Sequence[str], medians: Mapping[tuple[Case, str], float]
) -> Table:
    rows: list[list[Cell]] = []
    for model in dict.fromkeys(case.model for case in cases):
        of_model = sorted((case for case in cases if case.model == model), key=lambda case: case.ranks)
        for name in workloads:
            alone = next((medians[case, name] for case in of_model if case.ranks == 1), None)
            for case in of_model:
                median, workload = medians[case, name], WORKLOADS[name]
                share = "–" if alone is None else of_linear(alone, median, case.ranks, workload.more_is_better)
                sums = case.all_reduce if case.ranks > 1 else "–"
                rows.append([model, name, case.ranks, sums, median, workload.unit, share])
    columns = ["model", "workload", "ranks", "all_reduce", "median", "unit", "of linear, %"]
    return Table("workloads", columns, rows)


def of_linear(alone: float, together: float, ranks: int, more_is_better: bool) -> float:
    """How much of the ideal, ``ranks`` times as fast as one rank, is reached, in percent."""
    faster = together / alone if more_is_better else alone / together
    return 100 * faster / ranks


def _targets(medians: Mapping[tuple[Case, str], float]) -> list[Target]:
    """Those that are about what was measured, and about the engine as it comes."""
    if not torch.cuda.is_available():
        return []
    return [
        Target(
            f"{case.title}, {name}, {WORKLOADS[name].unit}",
            median,
            TARGETS[case.model, case.ranks, name],
            WORKLOADS[name].more_is_better,
        )
        for (case, name), median in medians.items()
        if (case.model, case.ranks, name) in TARGETS and case.all_reduce == "auto"
    ]
