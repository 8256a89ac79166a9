"""Attention alone: every backend on the same decode and prefill steps, beside the memory's and the tensor cores' speed.

A step's keys and values take turns among as many layers as the L2 cache cannot hold, as in a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from minisgl.attention import ATTENTION_BACKENDS
from minisgl.attention.registry import AttentionFactory
from minisgl.bench.gpu_timing import Call, buffers_needed, copy_bandwidth, eager_microseconds, microseconds
from minisgl.bench.report import Cell, Report, Table, Target
from minisgl.core import AttentionSpec, Batch, DeviceBatch, build_batch
from minisgl.core.registry import resolve
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.page_table import PageTable
from minisgl.kvcache.paged_attention import PagedAttention

_DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
PAGE_SIZE = 16
HEAD_DIM = 128
KV_HEADS = 8
_HEADS = {"0.6B": 16, "14B": 40}
"""Query heads of Qwen3."""
_MIXED = "256 × 100…2,000"


@dataclass(frozen=True, slots=True)
class Step:
    """A step to be timed.

    Args:
        name: in words.
        fed: tokens fed for each row; steps of one token a row are decode steps.
        cached: tokens each row has in the cache before.
        shared: leading tokens that all rows share, of those in the cache.
    """

    name: str
    fed: Sequence[int]
    cached: Sequence[int]
    shared: int = 0

    @property
    def decodes(self) -> bool:
        return max(self.fed) == 1

    @property
    def kv_tokens(self) -> int:
        """Tokens whose keys and values must be read, once each."""
        rows = len(self.fed)
        return sum(self.fed) + sum(self.cached) - (rows - 1) * self.shared

    def flops(self, heads: int) -> int:
        """Multiplications and additions of the two matrix products, over the keys that are seen."""
        seen = sum(fed * cached + fed * (fed + 1) // 2 for fed, cached in zip(self.fed, self.cached, strict=True))
        return 4 * heads * HEAD_DIM * seen


def steps() -> list[Step]:
    """What is timed: decode steps of one and of many rows, of a shared prefix, and prefill steps."""
    mixed = np.clip(np.random.default_rng(0).gamma(2.2, 390, 256), 100, 2000).astype(int).tolist()
    decode = [
        Step("1 × 640", [1], [639]),
        Step("1 × 8,192", [1], [8191]),
        Step("16 × 850", [1] * 16, [849] * 16),
        Step("64 × 850", [1] * 64, [849] * 64),
        Step(f"{_MIXED}, {np.mean(mixed):.0f} on average", [1] * 256, [length - 1 for length in mixed]),
        Step("256 × (2,048 shared + 64)", [1] * 256, [2111] * 256, 2048),
    ]
    prefill = [
        Step("1 × 8,192", [8192], [0]),
        Step("16 × 512", [512] * 16, [0] * 16),
        Step("64 × 128", [128] * 64, [0] * 64),
        Step("256 × 32 behind 2,048 shared", [32] * 256, [2048] * 256, 2048),
        Step("1 × 64 behind 8,192", [64], [8192]),
    ]
    return decode + prefill


def run_attention(backends: Sequence[str], repeat: int) -> Report:
    """Time each backend on each step, in the shapes of two models.

    Args:
        backends: names; those that cannot run here are left out, and listed with the reason.
        repeat: measurements of each, of which the fastest counts.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("attention: times of GPU kernels need a CUDA device, and there is none here")
    names, left_out = _runnable(backends)
    tables: list[Table] = []
    mixed_share = 0.0
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        for model, heads in _HEADS.items():
            rows: dict[bool, list[list[Cell]]] = {True: [], False: []}
            for step in steps():
                micros = [measure(step, heads, resolve("backends", name, ATTENTION_BACKENDS), repeat) for name in names]
                if step.decodes:
                    floor = step.kv_tokens * token_bytes() / bandwidth * 1e6
                    rows[True].append([step.name, floor, *micros, f"{floor / min(micros):.0%}"])
                    if step.name.startswith(_MIXED):
                        mixed_share = max(mixed_share, floor / min(micros))
                else:
                    rate = step.flops(heads) / min(micros) / 1e6
                    rows[False].append([step.name, step.flops(heads) / 1e9, *micros, rate])
            each = [f"{name}, µs" for name in names]
            decode = ["decode", "read once at copy speed, µs", *each, "fastest, × copy speed"]
            prefill = ["prefill", "GFLOP", *each, "fastest, TFLOP/s"]
            about = f"one layer of {model}, {heads} query and {KV_HEADS} KV heads of {HEAD_DIM}"
            tables.append(Table(f"decode, {about}; a copy moves {bandwidth / 1e12:.2f} TB/s", decode, rows[True]))
            tables.append(Table(f"prefill, {about}", prefill, rows[False]))
    return Report(
        "attention",
        {"backends": names, "left_out": left_out, "repeat": repeat, "dtype": "bfloat16", "page_size": PAGE_SIZE},
        tables,
        [Target("256 rows of mixed lengths, × copy speed", mixed_share, 0.88, at_least=True)],
    )


def token_bytes() -> int:
    """Keys and values of one token in one layer."""
    return 2 * KV_HEADS * HEAD_DIM * DTYPE.itemsize


def _runnable(backends: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """The backends that can be built here, and why the others cannot."""
    names: list[str] = []
    left_out: dict[str, str] = {}
    for name in backends or ATTENTION_BACKENDS:
        try:
            resolve("backends", name, ATTENTION_BACKENDS)(KVCache(1, KV_HEADS, HEAD_DIM, 1, PAGE_SIZE, DTYPE, _DEVICE))
        except ConfigError as error:
            left_out[name] = str(error)
        else:
            names.append(name)
    return names, left_out


def measure(step: Step, heads: int, make: AttentionFactory, repeat: int) -> float:
    """Microseconds that the attention of one layer takes, the keys being stored already.

    Args:
        step: what is attended.
        heads: query heads.
        make: the backend.
        repeat: measurements, of which the fastest counts.
    """
    backend, calls = attend_calls(step, heads, make, buffers_needed(step.kv_tokens * token_bytes()), _DEVICE)
    time = microseconds if backend.capturable else eager_microseconds
    return min(time(calls) for _ in range(repeat))


def attend_calls(
    step: Step, heads: int, make: AttentionFactory, layers: int, device: torch.device
) -> tuple[PagedAttention, list[Call]]:
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
    seq_lens = np.add(step.fed, step.cached)
    num_pages = -(-seq_lens // PAGE_SIZE)
    shared = step.shared // PAGE_SIZE
    total = shared + int((num_pages - shared).sum())
    table = PageTable(len(step.fed), int(seq_lens.max()), PAGE_SIZE, dummy_page=total)
    pages = np.random.default_rng(1).permutation(total).astype(np.int32)
    used = shared
    for slot, count in enumerate(num_pages.tolist()):
        table.write(slot, 0, pages[:shared])
        table.write(slot, shared, pages[used : used + count - shared])
        used += count - shared
    page_index, page_value = table.take_changes()
    nothing = np.zeros(0, dtype=np.int32)
    batch = build_batch(
        np.arange(len(step.fed), dtype=np.int32),
        np.array(step.fed, dtype=np.int32),
        np.array(step.cached, dtype=np.int32),
        table.rows,
        PAGE_SIZE,
        sample_rows=nothing,
        output_index=nothing,
        num_decode=len(step.fed) if step.decodes else 0,
        page_index=page_index,
        page_value=page_value,
    )
    inputs = DeviceBatch(
        input_ids=torch.zeros(batch.num_tokens, dtype=torch.int32, device=device),
        positions=torch.from_numpy(batch.positions).to(device),
        out_locs=torch.from_numpy(batch.out_locs).to(device),
        slots=torch.from_numpy(batch.slots).to(device),
        seq_lens=torch.from_numpy(batch.seq_lens).to(device),
        cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q).to(device),
        page_table=torch.from_numpy(table.rows).to(device),
        logit_rows=torch.zeros(0, dtype=torch.int32, device=device),
    )
    return KVCache(layers, KV_HEADS, HEAD_DIM, total, PAGE_SIZE, DTYPE, device), batch, inputs
