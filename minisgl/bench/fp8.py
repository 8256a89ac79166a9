"""Keys and values of eight bits: what they cost in precision, and what they buy in memory and time."""

from __future__ import annotations

import gc
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from minisgl.attention import ATTENTION_BACKENDS
from minisgl.bench.attention import DTYPE, HEAD_DIM, KV_HEADS, PAGE_SIZE, Step, measure, steps, token_bytes
from minisgl.bench.gpu_timing import copy_bandwidth
from minisgl.bench.offline import make_engine
from minisgl.bench.report import Cell, Report, Table
from minisgl.bench.shapes import model_dir
from minisgl.bench.workloads import WORKLOADS, run_workload
from minisgl.core import AttentionBackend, build_batch
from minisgl.core.registry import resolve
from minisgl.engine import Engine
from minisgl.engine.inputs import batch_arrays, device_batch
from minisgl.engine.staging import to_device
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.llm import LLM

_HEADS = 16
_ROUNDINGS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, KV in fp8": {"dtype": "float32", "kv_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV in fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
}
"""Options of engines that differ in nothing but how they round; the first is the reference of the others."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a model makes of a text that it is shown.

    Args:
        logprobs: float32[tokens] of each next token of the text.
        likeliest: [tokens] what the model would have chosen in its place.
        largest: absolute value among the keys, and among the values.
    """

    logprobs: torch.Tensor
    likeliest: torch.Tensor
    largest: tuple[float, float]


def run_fp8_error(model: str, text: Path, num_tokens: int, window: int) -> Report:
    """Show the same text to engines that round differently, and compare what they expect next.

    All attention is over what is stored, so that one pass over a text shows the error that decoding it would have.

    Args:
        model: as `minisgl.LLM` takes it.
        text: file to read.
        num_tokens: of it.
        window: tokens that are read in one go, with nothing before them.
    """
    readings: dict[str, Reading] = {}
    ids: list[int] = []
    for name, options in _ROUNDINGS.items():
        pages = {"page_size": PAGE_SIZE, "num_pages": -(-window // PAGE_SIZE), "max_running_requests": 1}
        llm = LLM(model, enforce_eager=True, **pages, **options)
        ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))[:num_tokens]
        windows = [ids[start : start + window] for start in range(0, len(ids) - 1, window)]
        readings[name] = _joined([read(llm.engine, part) for part in windows])
        del llm
        gc.collect()
    reference = next(iter(readings.values()))
    columns = [
        "computed in",
        "perplexity",
        "mean difference",
        "largest difference",
        "same choice",
        "largest k",
        "and v",
    ]
    rows = [_compared(name, reading, reference) for name, reading in readings.items()]
    title = f"{model}, {len(reference.logprobs)} tokens of text: logprob of each, against the first line"
    settings = {"model": model, "text": str(text), "tokens": len(ids), "window": window}
    return Report("fp8-error", settings, [Table(title, columns, rows)], [])


@torch.inference_mode()
def read(engine: Engine, ids: Sequence[int]) -> Reading:
    """Feed all of ``ids`` but the last as one prompt, over the first pages of an engine that does nothing else."""
    runner, count = engine.runner, len(ids) - 1
    page_size = runner.kv_cache.page_size
    pages = np.arange(-(-count // page_size), dtype=np.int32)[None]
    zero = np.zeros(1, dtype=np.int32)
    batch = build_batch(zero, np.array([count], dtype=np.int32), zero, pages, page_size, zero, zero, num_decode=0)
    tokens = torch.tensor(ids, dtype=torch.int32, device=runner.device)
    staged = to_device(batch_arrays(batch), runner.device)
    inputs = device_batch(staged, tokens[:-1], torch.from_numpy(pages).to(runner.device))
    inputs = replace(inputs, logit_rows=torch.arange(count, dtype=torch.int32, device=runner.device))
    runner.attention.plan(batch, inputs)
    logits = runner.forward(inputs).float()
    logprobs = logits.log_softmax(-1).gather(1, tokens[1:, None].long()).squeeze(1)
    written = [memory[:, : pages.size].flatten(1, 2)[:, :count] for memory in (runner.kv_cache.k, runner.kv_cache.v)]
    largest_k, largest_v = (float(memory.float().abs().max()) for memory in written)
    return Reading(logprobs, logits.argmax(-1), (largest_k, largest_v))


def _joined(parts: Sequence[Reading]) -> Reading:
    largest_k, largest_v = (max(values) for values in zip(*(part.largest for part in parts), strict=True))
    logprobs, likeliest = (torch.cat([getattr(part, name) for part in parts]) for name in ("logprobs", "likeliest"))
    return Reading(logprobs, likeliest, (largest_k, largest_v))


def _compared(name: str, reading: Reading, reference: Reading) -> list[Cell]:
    difference = (reading.logprobs - reference.logprobs).abs()
    same = float((reading.likeliest == reference.likeliest).float().mean())
    perplexity = float((-reading.logprobs.mean()).exp())
    return [name, perplexity, float(difference.mean()), float(difference.max()), f"{same:.1%}", *reading.largest]


def run_fp8(model: str, work: str, repeat: int) -> Report:
    """Attention alone and a whole workload, with keys and values of 16 and of 8 bits.

    Args:
        model: a name from `SHAPES`, or what `minisgl.LLM` takes.
        work: name from `WORKLOADS`.
        repeat: runs of it, of which the median counts.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("fp8: times of GPU kernels need a CUDA device, and there is none here")
    with torch.inference_mode():
        alone = _attention_table()
    torch.cuda.empty_cache()
    workload = WORKLOADS[work]
    rows: list[list[Cell]] = []
    samples: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as root:
        path = model_dir(model, Path(root))
        for kv_dtype in ("auto", "fp8"):
            llm = make_engine(path, model, {"kv_dtype": kv_dtype})
            values = samples[kv_dtype] = [run_workload(llm, workload, seed).value(workload) for seed in range(repeat)]
            engine, page_size = llm.engine, llm.config.page_size
            token = engine.page_bytes // page_size
            rows.append([kv_dtype, token, engine.num_pages * page_size, statistics.median(values)])
            del llm, engine
            gc.collect()
            torch.cuda.empty_cache()
    columns = ["kv_dtype", "bytes a token", "tokens that fit", f"{work}, {workload.unit}"]
    settings = {"model": model, "workload": workload.summary, "repeat": repeat}
    return Report("fp8", settings, [alone, Table(f"{model}, whole engine", columns, rows)], [], samples)


def _attention_table() -> Table:
    """One layer of Qwen3-0.6B, on the steps that are bound by what they read, and on a prefill step that is not."""
    bandwidth = copy_bandwidth()
    long = [step for step in steps() if step.shared == 0 and (len(step.fed) >= 64 or not step.decodes)]
    rows: list[list[Cell]] = []
    for step in long:
        wide, narrow = (measure(step, _HEADS, make, repeat=1) for make in (_wide, _over_eight_bits))
        rows.append([_titled(step), step.kv_tokens * token_bytes() / 2 / bandwidth * 1e6, wide, narrow, wide / narrow])
    columns = ["step", "eight bits read once at copy speed, µs", "bfloat16, µs", "eight bits, µs", "ratio"]
    return Table("attention of one layer, 16 query and 8 KV heads of 128", columns, rows)


def _titled(step: Step) -> str:
    return f"{'decode' if step.decodes else 'prefill'} {step.name}"


def _wide(kv_cache: KVCache) -> AttentionBackend:
    return resolve("backends", "triton", ATTENTION_BACKENDS)(kv_cache)


def _over_eight_bits(kv_cache: KVCache) -> AttentionBackend:
    """The backend of `_wide` over the same keys and values, rounded."""
    layers, pages = kv_cache.k.shape[:2]
    device = kv_cache.k.device
    narrow = KVCache(layers, KV_HEADS, HEAD_DIM, pages - 1, PAGE_SIZE, DTYPE, device, torch.float8_e4m3fn)
    narrow.k.copy_(kv_cache.k)
    narrow.v.copy_(kv_cache.v)
    return _wide(narrow)
