"""A conversation that returns: computed again, or copied back from host memory."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import numpy as np

from minisgl.bench.gpu import synchronize
from minisgl.bench.report import Report, Target
from minisgl.bench.workloads import free_memory, make_engine
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams

_ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)
_FASTER = 4.0  # times that the longest conversation should come back faster than it is computed
_COLUMNS = (
    "model", "tokens", "GB", "computed, ms", "copied out, ms", "copied back, ms", "and another out, ms",
    "computed / copied back", "computed / with another out", "least", "most",
)  # fmt: skip


def run_page_store(
    models: Sequence[str] = ("Qwen3-0.6B", "Qwen3-14B"),
    lengths: Sequence[int] = (512, 2000, 8000),
    repeat: int = 5,
    options: Mapping[str, Any] = {},
) -> Report:
    """Time to the first token of a prompt that is new, that is in host memory, and that has to evict another as well.

    The pool holds one conversation and a quarter. Nothing else runs, so no copy hides behind another request's step:
    a server sees less of them than this.
    """
    report = Report("page-store")
    table = report.table("a conversation that returns to an idle engine, medians", *_COLUMNS)
    for model in models:
        for length in lengths:
            page_size = options.get("page_size", 16)
            sizes = {"num_pages": 5 * length // (4 * page_size) + 2, "max_seq_len": max(length + 1, 128)}
            llm = make_engine(model, {**sizes, "max_running_requests": 4, "page_store": "host", **options})
            rng = np.random.default_rng(length)
            runs = [_measure(llm, rng, length) for _ in range(repeat + 1)][1:]  # the first compiles what is left
            columns = zip(_COLUMNS[3:7], zip(*runs, strict=True), strict=True)
            report.samples |= {f"{model}, {length} tokens, {name}": list(column) for name, column in columns}
            computed, out, back, both = (median(column) for column in zip(*runs, strict=True))
            size = length // page_size * llm.engine.page_bytes / 1e9
            ratios = [run[0] / run[3] for run in runs]  # the last column but two is of the medians
            times = (computed, out, back, both, computed / back, computed / both)
            table.add(model, length, size, *times, min(ratios), max(ratios))
            del llm
            free_memory()
        name = f"{model}, {length} tokens: times as fast as computed, and another out"
        report.targets.append(Target(name, computed / both, _FASTER, at_least=True))
    return report


def _measure(llm: LLM, rng: np.random.Generator, length: int) -> tuple[float, float, float, float]:
    """Milliseconds: computed, copied out, copied back, copied back while another is copied out."""
    wanted, other = rng.integers(llm.model_config.vocab_size, size=(2, length)).tolist()
    evict_all(llm)
    computed = _milliseconds(llm, wanted, cached=0)
    out = evict_all(llm)
    whole = (length - 1) // llm.config.page_size * llm.config.page_size
    back = _milliseconds(llm, wanted, cached=whole)
    evict_all(llm)
    _milliseconds(llm, other, cached=0)
    return computed, out, back, _milliseconds(llm, wanted, cached=whole)


def _milliseconds(llm: LLM, prompt: list[int], cached: int) -> float:
    start = time.perf_counter()
    (output,) = llm.generate([prompt], _ONE_TOKEN)
    taken = 1e3 * (time.perf_counter() - start)
    if output.cached_tokens != cached:
        raise AssertionError(f"{output.cached_tokens} of {len(prompt)} tokens were found, not {cached}")
    return taken


def evict_all(llm: LLM) -> float:
    """Empty the prefix cache of what no request reads, as if others had wanted all pages.

    Returns milliseconds until all copies are made.
    """
    memory, device = llm.scheduler.memory, llm.engine.device
    synchronize(device)
    start = time.perf_counter()
    memory.pool.free(memory.alloc(memory.available))
    synchronize(device)
    return 1e3 * (time.perf_counter() - start)
