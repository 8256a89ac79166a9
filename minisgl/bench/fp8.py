"""Keys and values of eight bits: what they cost in precision, and what they buy in memory and time."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from minisgl.attention.select import ATTENTION_BACKENDS
from minisgl.batch import batch_arrays, build_batch, device_batch, to_device
from minisgl.bench.attention import DTYPE, HEAD_DIM, KV_HEADS, PAGE_SIZE, measure, steps, token_bytes
from minisgl.bench.gpu_timing import copy_bandwidth, require_cuda
from minisgl.bench.report import Cell, Report, Table
from minisgl.bench.workloads import WORKLOADS, free_memory, make_engine, run_workload
from minisgl.context import AttentionBackend
from minisgl.engine.engine import Engine
from minisgl.kvcache.pool import KVCache
from minisgl.llm import LLM
from minisgl.registry import resolve

_QUERY_HEADS = 16
_TEXT = Path("chapters", "04-paged-kv.md")
_ROUNDINGS: Mapping[str, Mapping[str, Any]] = {
    "float32": {"dtype": "float32"},
    "float32, KV in fp8": {"dtype": "float32", "kv_dtype": "fp8"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV in fp8": {"dtype": "bfloat16", "kv_dtype": "fp8"},
}
"""Options of engines that differ only in how they round; the first is the reference of the others."""


class TextScores(NamedTuple):
    """What a model predicts along a text."""

    logprobs: torch.Tensor  # float32[tokens] of each next token of the text
    argmax: torch.Tensor  # [tokens] the token that the model would have chosen in its place
    largest: tuple[float, float]  # absolute value among the keys, and among the values


def run_fp8_error(model: str = "default", text: Path = _TEXT, tokens: int = 2048, window: int = 1024) -> Report:
    """Score the same text with engines that round differently, and compare their predictions.

    All attention reads what is stored, so one pass over a text shows the error that decoding it would have.
    """
    scores: dict[str, TextScores] = {}
    ids: list[int] = []
    for name, options in _ROUNDINGS.items():
        sizes: dict[str, Any] = {"page_size": PAGE_SIZE, "num_pages": -(-window // PAGE_SIZE)}
        llm = LLM(model, enforce_eager=True, max_running_requests=1, **sizes, **options)
        ids = llm.tokenizer.encode(text.read_text(encoding="utf-8"))[:tokens]
        parts = [score_text(llm.engine, ids[start : start + window]) for start in range(0, len(ids) - 1, window)]
        logprobs, argmax = torch.cat([part.logprobs for part in parts]), torch.cat([part.argmax for part in parts])
        largest = max(part.largest[0] for part in parts), max(part.largest[1] for part in parts)
        scores[name] = TextScores(logprobs, argmax, largest)
        del llm
        free_memory()
    reference = next(iter(scores.values()))
    columns = ["computed in", "perplexity", "mean difference", "largest difference", "same choice"]
    rows = [_compare(name, each, reference) for name, each in scores.items()]
    title = f"{model}, {len(reference.logprobs)} tokens of text: logprob of each, against the first line"
    return Report("fp8-error", {"tokens": len(ids)}, [Table(title, [*columns, "largest k", "and v"], rows)])


@torch.inference_mode()
def score_text(engine: Engine, ids: Sequence[int]) -> TextScores:
    """Feed all of ``ids`` but the last as one prompt, over the first pages of an idle engine."""
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
    return TextScores(logprobs, logits.argmax(-1), (largest_k, largest_v))


def _compare(name: str, scores: TextScores, reference: TextScores) -> list[Cell]:
    difference = (scores.logprobs - reference.logprobs).abs()
    same = float((scores.argmax == reference.argmax).float().mean())
    perplexity = float((-scores.logprobs.mean()).exp())
    return [name, perplexity, float(difference.mean()), float(difference.max()), f"{same:.1%}", *scores.largest]


def run_fp8(model: str = "Qwen3-0.6B", work: str = "mixed", repeat: int = 1) -> Report:
    """Attention alone and a whole workload, with keys and values of 16 and of 8 bits."""
    require_cuda("fp8")
    with torch.inference_mode():
        alone = _attention_table()
    torch.cuda.empty_cache()
    workload = WORKLOADS[work]
    rows: list[list[Cell]] = []
    samples: dict[str, list[float]] = {}
    for kv_dtype in ("auto", "fp8"):
        llm = make_engine(model, {"kv_dtype": kv_dtype})
        values = samples[kv_dtype] = [run_workload(llm, workload, seed).value(workload) for seed in range(repeat)]
        engine, page_size = llm.engine, llm.config.page_size
        token = engine.page_bytes // page_size
        rows.append([kv_dtype, token, engine.num_pages * page_size, statistics.median(values)])
        del llm, engine
        free_memory()
    columns = ["kv_dtype", "bytes a token", "tokens that fit", f"{work}, {workload.unit}"]
    return Report(
        "fp8", {"workload": workload.summary}, [alone, Table(f"{model}, whole engine", columns, rows)], [], samples
    )


def _attention_table() -> Table:
    """One layer of Qwen3-0.6B, on the steps that are bound by what they read, and on a prefill step that is not."""
    bandwidth = copy_bandwidth()
    rows: list[list[Cell]] = []
    for step in steps():
        if step.shared or (step.decodes and len(step.fed) < 64):
            continue
        wide, narrow = (measure(step, _QUERY_HEADS, make, repeat=1) for make in (_wide, _over_eight_bits))
        title = f"{'decode' if step.decodes else 'prefill'} {step.name}"
        rows.append([title, step.kv_tokens * token_bytes() / 2 / bandwidth * 1e6, wide, narrow, wide / narrow])
    columns = ["step", "eight bits read once at copy speed, µs", "bfloat16, µs", "eight bits, µs", "ratio"]
    return Table(f"attention of one layer, {_QUERY_HEADS} query and {KV_HEADS} KV heads of {HEAD_DIM}", columns, rows)


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
