"""Decode attention in the order in which one thinks of it: what each idea buys, beside the memory's speed."""

from __future__ import annotations

from functools import partial

import torch

from minisgl.attention import ATTENTION_BACKENDS
from minisgl.attention.flashinfer_support import flashinfer_obstacle
from minisgl.attention.registry import AttentionFactory
from minisgl.bench.attention import DTYPE, HEAD_DIM, KV_HEADS, PAGE_SIZE, Step, measure, steps, token_bytes
from minisgl.bench.gpu_timing import copy_bandwidth
from minisgl.bench.report import Cell, Report, Table
from minisgl.core.registry import resolve
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache

_GROUP = 2
"""Query heads for each KV head, in Qwen3-0.6B."""
_GROUPS = (1, 2, 4, 8, 16)
_ALONE, _SHARES = "a program for each row and query head", "equal shares of all keys"


def versions() -> dict[str, AttentionFactory]:
    """The ideas, each with those before it."""
    from minisgl.attention.triton_attention import TritonAttention  # Triton is not on every platform
    from minisgl.attention.triton_rows import RowAttention

    return {
        _ALONE: partial(RowAttention, grouped=False),
        "a program for each row and KV head": RowAttention,
        "each row in 4 pieces": partial(RowAttention, pieces=4),
        "each row in 16 pieces": partial(RowAttention, pieces=16),
        _SHARES: TritonAttention,
    }


def run_attention_steps(repeat: int) -> Report:
    """Time each version on decode steps of one and of many rows, and two of them over more and more query heads.

    Args:
        repeat: measurements of each, of which the fastest counts.

    Raises:
        ConfigError: there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise ConfigError("attention-steps: times of GPU kernels need a CUDA device, and there is none here")
    factories = versions()
    obstacle = flashinfer_obstacle(KVCache(1, KV_HEADS, HEAD_DIM, 1, PAGE_SIZE, DTYPE, torch.device("cuda")))
    if obstacle is None:
        factories["FlashInfer"] = resolve("backends", "flashinfer", ATTENTION_BACKENDS)
    decode = [step for step in steps() if step.decodes and step.shared == 0]
    with torch.inference_mode():
        bandwidth = copy_bandwidth()
        tables = [_step_table(step, factories, bandwidth, repeat) for step in decode]
        tables.append(_group_table(next(step for step in decode if len(step.fed) == 64), bandwidth, repeat))
    return Report(
        "attention-steps",
        {
            "repeat": repeat,
            "dtype": "bfloat16",
            "page_size": PAGE_SIZE,
            "kv_heads": KV_HEADS,
            "head_dim": HEAD_DIM,
            "copy_bytes_per_second": bandwidth,
            "left_out": {} if obstacle is None else {"flashinfer": obstacle},
        },
        tables,
        [],
    )


def _step_table(step: Step, factories: dict[str, AttentionFactory], bandwidth: float, repeat: int) -> Table:
    moved = step.kv_tokens * token_bytes()
    rows: list[list[Cell]] = []
    for name, make in factories.items():
        micros = measure(step, _GROUP * KV_HEADS, make, repeat)
        rows.append([name, micros, moved / micros / 1e3, f"{moved / bandwidth / micros * 1e6:.0%}"])
    about = f"{step.name}: {moved / 1e6:.1f} MB of keys and values, {moved / bandwidth * 1e6:.1f} µs at copy speed"
    return Table(about, ["decode attention of one layer", "µs", "GB/s", "of copy speed"], rows)


def _group_table(step: Step, bandwidth: float, repeat: int) -> Table:
    """The same keys and values for more and more query heads."""
    moved = step.kv_tokens * token_bytes()
    rows: list[list[Cell]] = []
    for group in _GROUPS:
        heads = group * KV_HEADS
        alone, shares = (measure(step, heads, versions()[name], repeat) for name in (_ALONE, _SHARES))
        rows.append([group, step.flops(heads) / moved, alone, shares, step.flops(heads) / shares / 1e6])
    columns = ["query heads a KV head", "FLOP a byte", f"{_ALONE}, µs", f"{_SHARES}, µs", f"{_SHARES}, TFLOP/s"]
    about = f"{step.name} with more query heads: always {moved / bandwidth * 1e6:.1f} µs at copy speed"
    return Table(about, columns, rows)
