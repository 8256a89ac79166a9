"""Attention alone: every backend, the ideas behind decode attention, and keys and values of eight bits.

A step's keys and values take turns among as many layers as the L2 cache cannot hold, as in a model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import torch

from minisgl.attention.select import ATTENTION_BACKENDS, AttentionFactory, flashinfer_obstacle
from minisgl.attention.torch_backend import PagedAttention
from minisgl.batch import Batch, DeviceBatch, batch_arrays, build_batch, device_batch, to_device
from minisgl.bench import gpu
from minisgl.bench.report import Report
from minisgl.bench.workloads import WORKLOADS, make_engine, workload_values
from minisgl.context import AttentionBackend, AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache, PageTable
from minisgl.registry import resolve

_DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE_SIZE = 16
HEAD_DIM = 128
KV_HEADS = 8
_SETTINGS = {"dtype": "bfloat16", "page_size": PAGE_SIZE, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
_QUERY_HEADS = {"0.6B": 16, "14B": 40}  # of Qwen3
_MIXED = "256 × 100…2,000"
_GROUPS = (1, 2, 4, 8, 16)
_ALONE, _SHARES = "a program for each row and query head", "equal shares of all keys"


class Step(NamedTuple):
    """A step to be timed."""

    name: str  # in words
    fed: Sequence[int]  # tokens fed for each row; one token for every row makes it a decode step
    cached: Sequence[int]  # tokens each row has in the cache before
    shared: int = 0  # how many of them, from the first on, all rows share

    @property
    def decodes(self) -> bool:
        return max(self.fed) == 1

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values must be read, once each."""
        rows = len(self.fed)
        return sum(self.fed) + sum(self.cached) - (rows - 1) * self.shared

    def flops(self, heads: int) -> int:
        """Multiplications and additions of the two matrix products, over the keys that each query sees."""
        seen = sum(fed * cached + fed * (fed + 1) // 2 for fed, cached in zip(self.fed, self.cached, strict=True))
        return 4 * heads * HEAD_DIM * seen


def steps() -> list[Step]:
    """Decode steps of one and of many rows and of a shared prefix, then prefill steps."""
    mixed = np.clip(np.random.default_rng(0).gamma(2.2, 390, 256), 100, 2000).astype(int).tolist()
    return [
        Step("1 × 640", [1], [639]),
        Step("1 × 8,192", [1], [8191]),
        Step("16 × 850", [1] * 16, [849] * 16),
        Step("64 × 850", [1] * 64, [849] * 64),
        Step(f"{_MIXED}, {np.mean(mixed):.0f} on average", [1] * 256, [length - 1 for length in mixed]),
        Step("256 × (2,048 shared + 64)", [1] * 256, [2111] * 256, 2048),
        Step("1 × 8,192", [8192], [0]),
        Step("16 × 512", [512] * 16, [0] * 16),
        Step("64 × 128", [128] * 64, [0] * 64),
        Step("256 × 32 behind 2,048 shared", [32] * 256, [2048] * 256, 2048),
        Step("1 × 64 behind 8,192", [64], [8192]),
    ]


def run_attention(backends: Sequence[str] = (), repeat: int = 3) -> Report:
    """Time each backend on each step, in the shapes of two models. Those that cannot run here are left out."""
    gpu.require_cuda("attention")
    names, left_out = list(backends or ATTENTION_BACKENDS), dict[str, str]()
    for name in names:
        try:
            _backend(name)(_small_cache())
        except ConfigError as error:
            left_out[name] = str(error)
    names = [name for name in names if name not in left_out]
    each = [f"{name}, µs" for name in names]
    report = Report("attention", {"backends": names, "left_out": left_out, **_SETTINGS})
    mixed_share = 0.0
    with torch.inference_mode():
        bandwidth = gpu.copy_bandwidth()
        for model, heads in _QUERY_HEADS.items():
            about = f"one layer of {model}, {heads} query and {KV_HEADS} KV heads of {HEAD_DIM}"
            columns = ("decode", "read once at copy speed, µs", *each, "fastest, × copy speed")
            decode = report.table(f"decode, {about}; a copy moves {bandwidth / 1e12:.2f} TB/s", *columns)
            prefill = report.table(f"prefill, {about}", "prefill", "GFLOP", *each, "fastest, TFLOP/s")
            for step in steps():
                micros = [measure(step, heads, _backend(name), repeat) for name in names]
                if step.decodes:
                    floor = step.kv_tokens * token_bytes() / bandwidth * 1e6
                    decode.add(step.name, floor, *micros, f"{floor / min(micros):.0%}")
                    if step.name.startswith(_MIXED):
                        mixed_share = max(mixed_share, floor / min(micros))
                else:
                    flops = step.flops(heads)
                    prefill.add(step.name, flops / 1e9, *micros, flops / min(micros) / 1e6)
    report.target("256 rows of mixed lengths, × copy speed", mixed_share, 0.88, at_least=True)
    return report


def token_bytes() -> int:
    """Bytes of keys and values of one token in one layer."""
    return 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def _backend(name: str) -> AttentionFactory:
    return resolve("backends", name, ATTENTION_BACKENDS)


def _small_cache() -> KVCache:
    return KVCache(1, KV_HEADS, HEAD_DIM, 1, PAGE_SIZE, DTYPE, _DEVICE)


def measure(step: Step, heads: int, make: AttentionFactory, repeat: int) -> float:
    """Microseconds that attention over stored keys takes in one layer with ``heads`` query heads, at best."""
    backend, calls = attend_calls(step, heads, make, gpu.buffers_needed(step.kv_tokens * token_bytes()), _DEVICE)
    time = gpu.microseconds if backend.capturable else gpu.eager_microseconds
    return min(time(calls) for _ in range(repeat))


def attend_calls(
    step: Step, heads: int, make: AttentionFactory, layers: int, device: torch.device
) -> tuple[PagedAttention, list[gpu.Call]]:
    """A backend that has planned a step, and for each layer a call that attends."""
    cache, batch, inputs = paged(step, layers, device)
    cache.k.normal_()
    cache.v.normal_()
    backend = make(cache)
    if not isinstance(backend, PagedAttention):
        raise ConfigError(f"attention: a {type(backend).__name__} cannot be timed alone, as it is no PagedAttention")
    backend.plan(batch, inputs)
    q = torch.randn((batch.num_tokens, heads, HEAD_DIM), dtype=DTYPE, device=device)
    spec = AttentionSpec(0, heads, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5)
    return backend, [partial(backend.attend, q, replace(spec, layer_id=layer)) for layer in range(layers)]


def paged(step: Step, layers: int, device: torch.device) -> tuple[KVCache, Batch, DeviceBatch]:
    """A step over pages in random order."""
    rows, seq_lens = len(step.fed), np.add(step.fed, step.cached)
    num_pages, shared = -(-seq_lens // PAGE_SIZE), step.shared // PAGE_SIZE
    total = shared + int((num_pages - shared).sum())
    table = PageTable(rows, int(seq_lens.max()), PAGE_SIZE, dummy_page=total)
    pages = np.random.default_rng(1).permutation(total).astype(np.int32)
    used = shared
    for slot, count in enumerate(num_pages.tolist()):
        table.write(slot, 0, pages[:shared])
        table.write(slot, shared, pages[used : used + count - shared])
        used += count - shared
    page_index, page_value = table.take_changes()
    slots, fed, cached, none = (np.array(each, dtype=np.int32) for each in (range(rows), step.fed, step.cached, ()))
    num_decode = rows if step.decodes else 0
    args = (slots, fed, cached, table.rows, PAGE_SIZE, none, none, num_decode)
    batch = build_batch(*args, page_index=page_index, page_value=page_value)
    staged = to_device(batch_arrays(batch), device)
    ids = torch.zeros(batch.num_tokens, dtype=torch.int32, device=device)
    inputs = device_batch(staged, ids, torch.from_numpy(table.rows).to(device))
    return KVCache(layers, KV_HEADS, HEAD_DIM, total, PAGE_SIZE, DTYPE, device), batch, inputs


def versions() -> dict[str, AttentionFactory]:
    """Decode attention as it grows: each idea, with those before it."""
    from minisgl.attention.triton.backend import FixedSplitAttention, TritonAttention

    return {
        _ALONE: partial(FixedSplitAttention, grouped=False),
        "a program for each row and KV head": FixedSplitAttention,
        "each row in 4 pieces": partial(FixedSplitAttention, num_splits=4),
        "each row in 16 pieces": partial(FixedSplitAttention, num_splits=16),
        _SHARES: TritonAttention,
    }


def run_attention_steps(repeat: int = 3) -> Report:
    """Time each of `versions` on decode steps of Qwen3-0.6B, and two of them over more and more query heads."""
    gpu.require_cuda("attention-steps")
    factories = versions()
    obstacle = flashinfer_obstacle(_small_cache())
    if obstacle is None:
        factories["FlashInfer"] = _backend("flashinfer")
    decode = [step for step in steps() if step.decodes and step.shared == 0]
    report = Report("attention-steps", {**_SETTINGS, "left_out": {} if obstacle is None else {"flashinfer": obstacle}})
    with torch.inference_mode():
        bandwidth = report.settings["copy_bytes_per_second"] = gpu.copy_bandwidth()
        for step in decode:
            moved = step.kv_tokens * token_bytes()
            copied = f"{moved / bandwidth * 1e6:.1f} µs at copy speed"
            title = f"{step.name}: {moved / 1e6:.1f} MB of keys and values, {copied}"
            table = report.table(title, "decode attention of one layer", "µs", "GB/s", "of copy speed")
            for name, make in factories.items():
                micros = measure(step, _QUERY_HEADS["0.6B"], make, repeat)
                table.add(name, micros, moved / micros / 1e3, f"{moved / bandwidth / micros * 1e6:.0%}")
        step = next(step for step in decode if len(step.fed) == 64)
        moved = step.kv_tokens * token_bytes()
        columns = ["query heads a KV head", "FLOP a byte", f"{_ALONE}, µs", f"{_SHARES}, µs", f"{_SHARES}, TFLOP/s"]
        copied = f"always {moved / bandwidth * 1e6:.1f} µs at copy speed"
        table = report.table(f"{step.name} with more query heads: {copied}", *columns)
        for group in _GROUPS:
            flops = step.flops(group * KV_HEADS)
            alone, shares = (measure(step, group * KV_HEADS, versions()[name], repeat) for name in (_ALONE, _SHARES))
            table.add(group, flops / moved, alone, shares, flops / shares / 1e6)
    return report


def run_fp8(model: str = "Qwen3-0.6B", work: str = "mixed", repeat: int = 1) -> Report:
    """Attention alone and a whole workload, with keys and values of 16 and of 8 bits."""
    gpu.require_cuda("fp8")
    report, workload = Report("fp8", {"workload": WORKLOADS[work].summary}), WORKLOADS[work]
    heads = _QUERY_HEADS["0.6B"]
    columns = ("step", "eight bits read once at copy speed, µs", "bfloat16, µs", "eight bits, µs", "ratio")
    alone = report.table(f"attention of one layer, {heads} query and {KV_HEADS} KV heads of {HEAD_DIM}", *columns)
    with torch.inference_mode():
        bandwidth = gpu.copy_bandwidth()
        for step in steps():  # those that are bound by what they read, and prefill steps that are not
            if step.shared or (step.decodes and len(step.fed) < 64):
                continue
            wide, narrow = (measure(step, heads, make, repeat=1) for make in (_wide, _over_eight_bits))
            title = f"{'decode' if step.decodes else 'prefill'} {step.name}"
            alone.add(title, step.kv_tokens * token_bytes() / 2 / bandwidth * 1e6, wide, narrow, wide / narrow)
    torch.cuda.empty_cache()
    unit = f"{work}, {workload.unit}"
    table = report.table(f"{model}, whole engine", "kv_dtype", "bytes a token", "tokens that fit", unit)
    for kv_dtype in ("auto", "fp8"):
        with make_engine(model, {"kv_dtype": kv_dtype}) as llm:
            values = report.samples[kv_dtype] = workload_values(llm, workload, repeat)
            page_size = llm.config.page_size
            token, room = llm.engine.page_bytes // page_size, llm.engine.num_pages * page_size
            table.add(kv_dtype, token, room, statistics.median(values))
    return report


def _wide(kv_cache: KVCache) -> AttentionBackend:
    return _backend("triton")(kv_cache)


def _over_eight_bits(kv_cache: KVCache) -> AttentionBackend:
    """The backend of `_wide` over the same keys and values, rounded."""
    (layers, pages), device = kv_cache.k.shape[:2], kv_cache.k.device
    narrow = KVCache(layers, KV_HEADS, HEAD_DIM, pages - 1, PAGE_SIZE, DTYPE, device, torch.float8_e4m3fn)
    narrow.k.copy_(kv_cache.k)
    narrow.v.copy_(kv_cache.v)
    return _wide(narrow)
