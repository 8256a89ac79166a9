"""Throughput and latency of whole workloads on one device, and how long an engine takes to its first token."""

from __future__ import annotations

import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload, warm_up
from minisgl.llm import LLM

TARGETS: dict[tuple[str, str], float] = {
    ("Qwen3-0.6B", "mixed"): 27_000,
    ("Qwen3-0.6B", "bs1"): 0.95,
    ("Qwen3-0.6B", "prefix"): 0.30,
    ("Qwen3-14B", "mixed"): 6_600,
    ("Qwen3-14B", "bs1"): 7.9,
}
"""What was aimed at on one H200 in bfloat16, in the workload's unit."""
_START_TARGETS = {"cached": 12.0, "cold": 120.0}


def run_offline(
    models: Sequence[str], workloads: Sequence[str], repeat: int, options: Mapping[str, Any], start: bool = False
) -> Report:
    """Every workload on every model.

    Args:
        models: names from `SHAPES`, which get random weights, or what `minisgl.LLM` takes.
        workloads: names from `WORKLOADS`.
        repeat: runs of each, with new prompts; the median counts.
        options: of `minisgl.LLM`.
        start: also measure the time from an empty process to the first token, for the first model.
    """
    rows: list[list[Cell]] = []
    starts: list[list[Cell]] = []
    targets: list[Target] = []
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        if start:
            starts = _starts(models[0], model_dir(models[0], Path(root)), options, targets)
        for model in models:
            llm = make_engine(model_dir(model, Path(root)), model, options)
            for name in workloads:
                workload = WORKLOADS[name]
                values = [run_workload(llm, workload, seed).value(workload) for seed in range(repeat)]
                samples[f"{model} {name}, {workload.unit}"] = values
                rows.append([model, name, statistics.median(values), min(values), max(values), workload.unit])
                if (model, name) in TARGETS and torch.cuda.is_available():
                    aim = TARGETS[model, name]
                    title = f"{model} {name}, {workload.unit}"
                    targets.append(Target(title, statistics.median(values), aim, workload.more_is_better))
            del llm
            gc.collect()
            torch.cuda.empty_cache()
    tables = [Table("workloads", ["model", "workload", "median", "least", "most", "unit"], rows)]
    if starts:
        tables.append(Table("from an empty process to the first token", ["model", "kernels", "s"], starts))
    summaries = {name: WORKLOADS[name].summary for name in workloads}
    return Report("offline", {"options": dict(options), "workloads": summaries}, tables, targets, samples)


def make_engine(path: str, model: str, options: Mapping[str, Any]) -> LLM:
    """An engine for the workloads, warmed up: sequences of up to 4,096 tokens, and random weights for a shape."""
    dummy = {"load_format": "dummy"} if path != model else {}
    llm = LLM(path, **{"max_seq_len": 4096, **dummy, **options})
    warm_up(llm)
    return llm


def _starts(model: str, path: str, options: Mapping[str, Any], targets: list[Target]) -> list[list[Cell]]:
    """Seconds to the first token, in processes of their own: with no compiled kernel anywhere, then with all."""
    rows: list[list[Cell]] = []
    with tempfile.TemporaryDirectory() as cache:
        folders = {name: f"{cache}/{name}" for name in ("TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")}
        for kernels in ("cold", "cached"):
            begin = time.perf_counter()
            code = f"from minisgl.bench.offline import make_engine; make_engine({path!r}, {model!r}, {dict(options)!r})"
            subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, **folders})
            seconds = time.perf_counter() - begin
            rows.append([model, kernels, seconds])
            if torch.cuda.is_available():
                title = f"{model} first token, kernels {kernels}, s"
                targets.append(Target(title, seconds, _START_TARGETS[kernels], at_least=False))
    return rows
