"""Tensor parallelism: whole workloads over more and more ranks, and what it takes to tell ranks what to do."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.bench.control_planes import STEPS, measure_planes
from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload

TARGETS: dict[tuple[str, int, str], float] = {
    ("Qwen3-32B", 4, "mixed"): 9_300,
    ("Qwen3-32B", 4, "bs1"): 6.0,
    ("Qwen3-32B", 4, "prefix"): 0.60,
}
"""What was aimed at on four H200s in bfloat16, in the workload's unit."""


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
        models: names from `SHAPES`, which get random weights, or what `minisgl.LLM` takes.
        ranks: numbers of ranks.
        workloads: names from `WORKLOADS`.
        repeat: runs of each, with new prompts; the median counts.
        steps: that are sent over each control plane.
        options: of `minisgl.LLM`.
    """
    samples: dict[str, list[float]] = {}
    medians: dict[tuple[str, int, str], float] = {}
    with tempfile.TemporaryDirectory() as root:
        # A single rank is an engine in this process, which then keeps some of the first GPU for itself: it comes last.
        for size in sorted(ranks, reverse=True):
            for model in models:
                path = model_dir(model, Path(root))
                for name, values in _measure(path, model, size, workloads, repeat, options).items():
                    samples[f"{model} over {size}, {name}, {WORKLOADS[name].unit}"] = values
                    medians[model, size, name] = statistics.median(values)
    rows: list[list[Cell]] = [
        [model, name, size, medians[model, size, name], WORKLOADS[name].unit, _efficiency(medians, model, size, name)]
        for model in models
        for name in workloads
        for size in sorted(ranks)
    ]
    targets = []
    for (model, size, name), aim in TARGETS.items():
        if (model, size, name) in medians and torch.cuda.is_available():
            title = f"{model} over {size}, {name}, {WORKLOADS[name].unit}"
            targets.append(Target(title, medians[model, size, name], aim, WORKLOADS[name].more_is_better))
    tables = [
        Table("workloads", ["model", "workload", "ranks", "median", "unit", "of linear, %"], rows),
        measure_planes([size for size in sorted(ranks) if size > 1], steps),
    ]
    summaries = {**{name: WORKLOADS[name].summary for name in workloads}, **STEPS}
    return Report("tp", {"options": dict(options), "workloads": summaries, "steps": steps}, tables, targets, samples)


def _measure(
    path: str, model: str, size: int, workloads: Sequence[str], repeat: int, options: Mapping[str, Any]
) -> dict[str, list[float]]:
    with make_engine(path, model, {**options, "tensor_parallel_size": size}) as llm:
        values = {
            name: [run_workload(llm, WORKLOADS[name], seed).value(WORKLOADS[name]) for seed in range(repeat)]
            for name in workloads
        }
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return values


def _efficiency(medians: Mapping[tuple[str, int, str], float], model: str, size: int, name: str) -> Cell:
    """How much of the ideal, ``size`` times as fast as one rank, is reached; unknown without one rank."""
    if (model, 1, name) not in medians:
        return "–"
    alone, together = medians[model, 1, name], medians[model, size, name]
    faster = together / alone if WORKLOADS[name].more_is_better else alone / together
    return 100 * faster / size
