"""What each step of chapters 10 to 12 buys: the same workloads with the optimisations switched on one after another,
beside what other engines were measured to do."""

from __future__ import annotations

import gc
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload

ALL_OFF: dict[str, Any] = {
    "prefill_attention": "triton",
    "decode_attention": "triton",
    "enforce_eager": True,
    "fusions": (),
    "sampler": "default",
    "overlap": False,
}
LADDER: tuple[tuple[str, dict[str, Any]], ...] = (
    ("paged attention kernels, all else plain PyTorch", {}),
    ("+ CUDA graphs", {"enforce_eager": False}),
    ("+ fused norm, rope and activation", {"fusions": ("norm", "rope", "activation")}),
    ("+ fused sampler", {"sampler": "triton"}),
    ("+ single-token decoder", {"fusions": ("norm", "rope", "activation", "single-token")}),
    ("+ overlap", {"overlap": True}),
    ("+ shared prefixes read once", {"prefill_attention": "cascade", "decode_attention": "cascade"}),
)
"""Each line adds its options to those of the lines above."""
REFERENCE = Path("benchmarks", "reference", "h200.json")


def run_compare(model: str, workloads: Sequence[str], repeat: int, ladder: Sequence[int] | None = None) -> Report:
    """Every workload on every rung of the ladder.

    Args:
        model: a name from `SHAPES`, or what `minisgl.LLM` takes.
        workloads: names from `WORKLOADS`.
        repeat: runs of each; the median counts.
        ladder: indices of the rungs to run; None runs all.
    """
    rows: list[list[Cell]] = []
    samples: dict[str, list[float]] = {}
    options = dict(ALL_OFF)
    with tempfile.TemporaryDirectory() as root:
        path = model_dir(model, Path(root))
        for index, (label, added) in enumerate(LADDER):
            options |= added
            if ladder is None or index in ladder:
                values = _measure(path, model, options, workloads, repeat)
                samples |= {f"{label}: {name}": values[name] for name in workloads}
                rows.append([label, *(statistics.median(values[name]) for name in workloads)])
    units = [f"{name}, {WORKLOADS[name].unit}" for name in workloads]
    tables = [Table(f"{model}, one optimisation after another", ["", *units], rows)]
    if REFERENCE.exists():
        tables.append(_others(model, workloads, units))
    return Report("compare", {"model": model, "ladder": [label for label, _ in LADDER]}, tables, [], samples)


def _measure(
    path: str, model: str, options: Mapping[str, Any], workloads: Sequence[str], repeat: int
) -> dict[str, list[float]]:
    llm = make_engine(path, model, options)
    values = {
        name: [run_workload(llm, WORKLOADS[name], seed).value(WORKLOADS[name]) for seed in range(repeat)]
        for name in workloads
    }
    del llm
    gc.collect()
    return values


def _others(model: str, workloads: Sequence[str], units: Sequence[str]) -> Table:
    reference = json.loads(REFERENCE.read_text(encoding="utf-8"))
    rows: list[list[Cell]] = []
    for engine in reference["engines"]:
        results = engine["results"].get(model, {})
        if results:
            rows.append([engine["name"], *(results.get(name, "–") for name in workloads)])
    return Table(f"other engines, {reference['hardware']}, {reference['date']}", ["", *units], rows)
