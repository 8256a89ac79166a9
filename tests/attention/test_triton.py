"""Our Triton kernels: what the contract tests do not reach, with heads as real models have them."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import pytest
import torch
import triton

from minisgl.attention import ATTENTION_BACKENDS
from minisgl.attention.triton_attention import TritonAttention
from minisgl.attention.triton_prefill import query_tiles, tile_shape
from minisgl.core import AttentionSpec, DeviceBatch
from minisgl.core.registry import resolve
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from tests.attention import PagedSequences, Step
from tests.steps import CPU, step_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def layers(*windows: int | None, group: int = 2, kv_heads: int = 2, head_dim: int = 16) -> list[AttentionSpec]:
    scale = head_dim**-0.5
    return [AttentionSpec(i, kv_heads * group, kv_heads, head_dim, scale, w) for i, w in enumerate(windows)]


@pytest.mark.parametrize("backend", ["triton", "cascade"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_all_dtypes(backend: str, dtype: torch.dtype) -> None:
    make = resolve("attention", backend, ATTENTION_BACKENDS)
    sequences = PagedSequences(make, DEVICE, layers(None, 50), [20, 140, 300], 16, dtype)
    sequences.fill([5, 139, 290])
    sequences.run({1: 1, 2: 1, 0: 11})


@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (5, 16), (7, 24), (17, 16), (2, 80)])
def test_groups_and_widths_that_are_no_power_of_two(group: int, head_dim: int) -> None:
    specs = layers(None, group=group, kv_heads=1, head_dim=head_dim)
    sequences = PagedSequences(TritonAttention, DEVICE, specs, [140, 40], 4)
    sequences.fill([138, 3])
    sequences.run({0: 1, 1: 37})
    sequences.run({0: 1})


def test_many_rows() -> None:
    """More than a program's tile, of lengths that are all different, in a mixed step."""
    lengths = [row % 37 + 2 for row in range(40)]
    sequences = PagedSequences(TritonAttention, DEVICE, layers(None, 5), lengths)
    sequences.fill([length - 1 for length in lengths[:-1]] + [0])
    sequences.run({row: 1 for row in range(39)} | {39: lengths[39]}, num_decode=30)


def test_a_row_in_several_programs_is_merged() -> None:
    sequences = PagedSequences(TritonAttention, DEVICE, layers(None, 200, None), [600, 300, 3], 16)
    sequences.fill([590, 280, 1])
    for _ in range(2):
        sequences.run({0: 1, 1: 1, 2: 1})


def test_large_scores_do_not_overflow() -> None:
    sequences = PagedSequences(TritonAttention, DEVICE, layers(None, 30), [150, 80], 4, torch.float16)
    for q, k, _ in sequences.sequences:
        for row in range(2):
            q[row] *= 60
            k[row] *= 60
            k[row][100:] = -k[row][100:].abs()
    sequences.fill([140, 0])
    sequences.run({0: 1, 1: 80})


# -- tiles of queries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("q_lens", "kv_lens", "group"), [([1, 1, 3, 70, 33], [4, 9, 0, 5, 300], 5), ([8], [0], 1)])
def test_tiles_hold_every_query_once(q_lens: list[int], kv_lens: list[int], group: int) -> None:
    batch, _ = step_of(q_lens, kv_lens)
    tiles = query_tiles(batch, group, torch.empty(0, 1, 1, 64, dtype=torch.bfloat16))
    queries = set()
    keys = []
    for row, begin in zip(tiles.rows.tolist(), tiles.begins.tolist(), strict=True):
        stop = min(begin + tiles.block_m, q_lens[row] * group)
        tile = {(row, index) for index in range(begin, stop)}
        assert tile
        assert not tile & queries
        queries |= tile
        keys.append(kv_lens[row] + begin // group)
    prefill = range(batch.num_decode, batch.num_rows)
    assert queries == {(row, index) for row in prefill for index in range(q_lens[row] * group)}
    assert keys == sorted(keys, reverse=True)


def test_long_prompts_get_large_tiles() -> None:
    narrow, wide = (torch.empty(0, 1, 1, dim, dtype=torch.bfloat16) for dim in (128, 256))
    assert tile_shape(narrow, 8192) > tile_shape(narrow, 100)
    assert tile_shape(wide, 8192) == tile_shape(wide, 100)


# -- where it does not run -----------------------------------------------------------------------------------------


def cache_of(dtype: torch.dtype) -> KVCache:
    return KVCache(1, 1, 8, 1, 16, dtype, CPU)


@pytest.mark.parametrize("name", ["triton", "cascade"])
def test_without_a_gpu_it_asks_for_the_interpreter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(ConfigError, match=r"decode_attention.*'cpu'.*'torch'.*TRITON_INTERPRET=1"):
        resolve("attention", name, ATTENTION_BACKENDS)(cache_of(torch.float32))


def test_float64_is_left_to_the_reference() -> None:
    with pytest.raises(ConfigError, match="float64; choose 'torch'"):
        TritonAttention(cache_of(torch.float64))


# -- on the GPU ----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cascade"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 4, 5, 7, 8])
def test_real_heads_in_bfloat16(backend: str, group: int, head_dim: int) -> None:
    """Random mixed steps, some of whose rows share a prefix of 320 tokens."""
    rng = np.random.default_rng(group)
    lengths = rng.integers(330, 1500, size=24).tolist()
    specs = layers(None, 257, group=group, kv_heads=2, head_dim=head_dim)
    sequences = PagedSequences(
        resolve("attention", backend, ATTENTION_BACKENDS), DEVICE, specs, lengths, 16, torch.bfloat16
    )
    for row in range(1, 12):
        sequences.share(row, 0, 20)
    kv_lens = [320 if row % 2 else length - 5 for row, length in enumerate(lengths)]
    sequences.fill(kv_lens)
    for feeds in (dict.fromkeys(range(0, 24, 2), 1) | {1: 1, 3: 9, 5: 3}, dict.fromkeys(range(24), 1), {7: 2, 9: 8}):
        sequences.run(feeds)


def replay(sequences: PagedSequences, graph: torch.cuda.CUDAGraph, buffers: Step, step: Step) -> Hashable:
    """Run ``step`` through a graph that was captured over ``buffers``; what the backend calls its work."""
    for name in DeviceBatch.__slots__:
        getattr(buffers.inputs, name).copy_(getattr(step.inputs, name))
    for (given, _), (taken, _) in zip(step.layers, buffers.layers, strict=True):
        for source, target in zip(given, taken, strict=True):
            target.copy_(source)
    key = sequences.backend.plan(step.batch, buffers.inputs)
    graph.replay()
    return key


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cascade"])
def test_one_graph_serves_all_lengths_and_groups(backend: str) -> None:
    """Captured with one set of rows, replayed with others: lengths, slots, pages, and who shares what."""
    rng = np.random.default_rng(5)
    lengths = rng.integers(700, 3000, size=64).tolist()
    specs = layers(None, 300, None, group=2, kv_heads=8, head_dim=128)
    sequences = PagedSequences(
        resolve("attention", backend, ATTENTION_BACKENDS), DEVICE, specs, lengths, 16, torch.bfloat16
    )
    if backend == "cascade":
        for row in range(1, 64):
            sequences.share(row, 0 if row < 40 else 40, 40)
    sequences.fill([length - 20 for length in lengths])

    def step(rows: int) -> Step:
        order = rng.permutation(64)[:rows].tolist()
        return sequences.step(dict.fromkeys(order, 1), padding=32 - rows)

    buffers = step(32)
    key = sequences.backend.plan(buffers.batch, buffers.inputs)
    outputs = [sequences.backend.forward(*qkv, spec) for (qkv, _), spec in zip(buffers.layers, specs, strict=True)]
    sequences.check(outputs, buffers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [sequences.backend.forward(*qkv, spec) for (qkv, _), spec in zip(buffers.layers, specs, strict=True)]
    for rows in (32, 31, 20, 32, 32, 25, 32):
        taken = step(rows)
        for output in outputs:
            output.fill_(torch.nan)
        assert replay(sequences, graph, buffers, taken) == key
        sequences.check(outputs, taken)
