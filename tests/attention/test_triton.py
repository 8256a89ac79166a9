"""Our Triton kernels: what the contract tests do not reach, with heads as real models have them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Hashable
from functools import partial

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from minisgl.attention.select import ATTENTION_BACKENDS
from minisgl.attention.triton.backend import FixedSplitAttention, TritonAttention
from minisgl.attention.triton.merge import add_parts
from minisgl.attention.triton.prefill import query_tiles, tile_shape
from minisgl.attention.triton.tiles import LOWEST, softmax_step
from minisgl.batch import DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.registry import resolve
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


@pytest.mark.parametrize("rows", [40, 80])
def test_many_rows(rows: int) -> None:
    """Of lengths that are all different, in a mixed step."""
    lengths = [row % 37 + 2 for row in range(rows)]
    sequences = PagedSequences(TritonAttention, DEVICE, layers(None, 5), lengths)
    sequences.fill([length - 1 for length in lengths[:-1]] + [0])
    sequences.run({row: 1 for row in range(rows - 1)} | {rows - 1: lengths[-1]}, num_decode=rows - 10)


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


# -- one step at a time --------------------------------------------------------------------------------------------


@triton.jit
def one_softmax_step(
    q_ptr,
    k_ptr,
    v_ptr,
    visible_ptr,
    acc_ptr,
    sum_ptr,
    max_ptr,
    scale,
    MASKED: tl.constexpr,
    N: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    rows, keys, dims = tl.arange(0, M), tl.arange(0, N), tl.arange(0, D)
    queries, pairs = rows[:, None] * D + dims[None, :], keys[:, None] * D + dims[None, :]
    visible = tl.load(visible_ptr + rows[:, None] * N + keys[None, :]) != 0
    acc, row_sum, row_max = softmax_step(
        tl.load(q_ptr + queries), tl.load(k_ptr + pairs), tl.load(v_ptr + pairs), visible, scale,
        tl.load(acc_ptr + queries), tl.load(sum_ptr + rows), tl.load(max_ptr + rows), MASKED,
    )  # fmt: skip
    tl.store(acc_ptr + queries, acc)
    tl.store(sum_ptr + rows, row_sum)
    tl.store(max_ptr + rows, row_max)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [True, False])
def test_a_tile_of_keys_joins_what_was_summed_up_before(masked: bool, dtype: torch.dtype) -> None:
    """Rows whose old maximum is below, among, or above the scores, and one that has none. The last row sees no key."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(16, 16, generator=generator).to(DEVICE, dtype) for _ in range(3))
    visible = (torch.rand(16, 16, generator=generator) < 0.7).to(DEVICE, torch.int32)
    visible[:, 0], visible[-1] = 1, 0
    before = torch.tensor([-200.0, 0.0, 200.0, LOWEST.value] * 4, device=DEVICE)
    acc = torch.randn(16, 16, generator=generator).to(DEVICE) * (before > LOWEST.value)[:, None]
    row_sum, row_max, old_acc = (before > LOWEST.value).float(), before.clone(), acc.clone()
    before[-1] = row_max[-1] = 5.0
    row_sum[-1] = 1.0
    old_sum = row_sum.clone()
    one_softmax_step[(1,)](q, k, v, visible, acc, row_sum, row_max, 2.0, masked, 16, 16, 16)

    scores = q.double() @ k.double().T * 2.0
    if masked:
        scores = scores.masked_fill(visible == 0, -torch.inf)
    largest = torch.maximum(before.double(), scores.max(dim=1).values)
    kept, weights = torch.exp2(before.double() - largest), torch.exp2(scores - largest[:, None])
    tolerance = 1e-4 if dtype is torch.float32 else 5e-2
    close = partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance, check_dtype=False)
    close(row_max, largest, msg=lambda text: f"the largest score so far: {text}")
    close(row_sum, old_sum * kept + weights.sum(dim=1), msg=lambda text: f"the sum of the weights: {text}")
    close(acc, old_acc * kept[:, None] + weights @ v.double(), msg=lambda text: f"the sum of the values: {text}")


@triton.jit
def two_rounds_of_parts(
    out_ptr, lse_ptr, acc_ptr, sum_ptr, max_ptr, first, num_first, num_second,
    NUM_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_P: tl.constexpr, H: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    heads, dims = tl.arange(0, H), tl.arange(0, D)
    acc = tl.zeros([H, D], tl.float32)
    row_sum = tl.zeros([H], tl.float32)
    row_max = tl.full([H], LOWEST, tl.float32)
    acc, row_sum, row_max = add_parts(
        out_ptr, lse_ptr, first, num_first, heads, acc, row_sum, row_max, NUM_HEADS, HEAD_DIM, BLOCK_P, D
    )
    acc, row_sum, row_max = add_parts(
        out_ptr, lse_ptr, first + num_first, num_second, heads, acc, row_sum, row_max, NUM_HEADS, HEAD_DIM, BLOCK_P, D
    )
    tl.store(acc_ptr + heads[:, None] * D + dims[None, :], acc)
    tl.store(sum_ptr + heads, row_sum)
    tl.store(max_ptr + heads, row_max)


@pytest.mark.parametrize("block_p", [1, 2, 8])
@pytest.mark.parametrize("counts", [(5, 2), (1, 4), (0, 3)])
def test_parts_are_weighted_relative_to_the_largest_of_all(counts: tuple[int, int], block_p: int) -> None:
    """The largest log-sum-exp comes first, last, or between; three heads of four, six dimensions of eight."""
    num_parts, generator = sum(counts), torch.Generator().manual_seed(1)
    out = torch.full((2 + num_parts + 8, 3, 6), torch.nan)  # what is no part of the row is no number
    lse = torch.full((2 + num_parts + 8, 3), torch.nan)
    parts, ends = torch.randn(num_parts, 3, 6, generator=generator), torch.randn(num_parts, 3, generator=generator)
    ends[0, 0], ends[-1, 1], ends[num_parts // 2, 2] = 300.0, 300.0, 4.0
    out[2 : 2 + num_parts], lse[2 : 2 + num_parts] = parts, ends
    acc, row_sum, row_max = (torch.full(shape, torch.nan, device=DEVICE) for shape in ((4, 8), (4,), (4,)))
    arrays = out.to(DEVICE), lse.to(DEVICE), acc, row_sum, row_max
    two_rounds_of_parts[(1,)](*arrays, 2, *counts, NUM_HEADS=3, HEAD_DIM=6, BLOCK_P=block_p, H=4, D=8)
    largest = ends.double().max(dim=0).values
    weights = torch.exp2(ends.double() - largest)
    close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5, check_dtype=False)
    close(row_max.cpu()[:3], largest)
    close(row_sum.cpu()[:3], weights.sum(dim=0))
    close(acc.cpu()[:3, :6], (parts.double() * weights[:, :, None]).sum(dim=0))
    assert not acc[3].any(), "a head that isn't there counts as 0"
    assert not acc[:, 6:].any(), "as do dimensions that aren't there"


# -- tiles of queries ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "group"),
    [
        ([1, 1, 3, 70, 33], [4, 9, 0, 5, 300], 5),
        ([8], [0], 1),
        ([64, 128], [0, 0], 1),  # just full tiles
        ([40, 5], [0, 20], 1),  # the longer row has fewer keys before it
    ],
)
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


@pytest.mark.parametrize(
    ("q_lens", "group", "longest"), [([500, 3], 5, 2500), ([1500, 1500], 1, 1500), ([3, 2048], 1, 2048)]
)
def test_the_longest_row_decides_how_large_tiles_are(q_lens: list[int], group: int, longest: int) -> None:
    batch, _ = step_of(q_lens, [0] * len(q_lens))
    for dim in (64, 256):
        q = torch.empty(0, 1, 1, dim, dtype=torch.bfloat16)
        tiles = query_tiles(batch, group, q)
        assert (tiles.block_m, tiles.block_n) == tile_shape(q, longest), f"the longest row has {longest} queries"
        assert tiles.rows.dtype == tiles.begins.dtype == torch.int32


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
        if isinstance(target := getattr(buffers.inputs, name), torch.Tensor):
            target.copy_(getattr(step.inputs, name))
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


# -- a fixed number of splits, on any device ------------------------------------------------------------------------

VERSIONS = [(False, 1), (True, 1), (False, 3), (True, 4), (True, 16)]


@pytest.mark.parametrize(("grouped", "num_splits"), VERSIONS)
def test_rows_of_unequal_lengths(grouped: bool, num_splits: int) -> None:
    """Some shorter than a tile, so that most of their splits are empty; one layer has a window."""
    make = partial(FixedSplitAttention, grouped=grouped, num_splits=num_splits)
    sequences = PagedSequences(make, DEVICE, layers(None, 50), [3, 40, 300, 130], 16)
    sequences.fill([1, 38, 290, 128])
    for _ in range(2):
        sequences.run(dict.fromkeys(range(4), 1))


def test_a_window_of_few_keys_leaves_splits_empty() -> None:
    """One layer sees a single key, its own, so that a row has one split with a key and one without."""
    make = partial(FixedSplitAttention, num_splits=2)
    sequences = PagedSequences(make, DEVICE, layers(1, 50), [131, 65], 16)
    sequences.fill([128, 64])
    sequences.run({0: 1, 1: 1})


@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (5, 24), (17, 16)])
def test_mixed_steps_of_groups_and_widths_that_are_no_power_of_two(group: int, head_dim: int) -> None:
    for grouped in (True, False):
        make = partial(FixedSplitAttention, grouped=grouped, num_splits=3)
        sequences = PagedSequences(make, DEVICE, layers(None, group=group, head_dim=head_dim), [150, 40], 4)
        sequences.fill([148, 38])
        sequences.run({0: 1, 1: 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_a_mixed_step(dtype: torch.dtype) -> None:
    make = partial(FixedSplitAttention, num_splits=2)
    sequences = PagedSequences(make, DEVICE, layers(None), [20, 140, 300], 16, dtype)
    sequences.fill([5, 139, 290])
    sequences.run({1: 1, 2: 1, 0: 11})


def test_splits_with_scores_far_apart_are_merged() -> None:
    """They are weighted relative to the largest sum of weights, or powers of two overflow."""
    make = partial(FixedSplitAttention, num_splits=4)
    sequences = PagedSequences(make, DEVICE, layers(None), [150, 80], 4)
    for q, k, _ in sequences.sequences:
        for row in range(2):
            q[row] *= 60
            k[row] *= 60
    sequences.fill([148, 78])
    sequences.run({0: 1, 1: 1})


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from minisgl.attention.triton.decode import decode_kernel
from minisgl.attention.triton.merge import merge_kernel
from minisgl.attention.triton.prefill import prefill_kernel
from minisgl.attention.triton.prefix import prefix_kernel
from minisgl.attention.triton.backend import merge_splits_kernel, fixed_split_kernel

FLOATS = {"part_out_ptr", "part_lse_ptr", "prefix_out_ptr", "prefix_lse_ptr", "out_lse_ptr"}
FLOATS |= {"split_out_ptr", "split_lse_ptr"}
HALVES = {"q_ptr", "k_cache_ptr", "v_cache_ptr", "out_ptr"}
COUNTS = {"num_rows", "num_groups", "programs", "token_stride", "head_stride", "table_width"}
MODEL = {"PAGE_SIZE": 16, "GROUP": 5, "KV_HEADS": 8, "HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_N": 64, "BLOCK_R": 256}
MODEL |= {"SINKS": False, "sinks_ptr": None}
MODEL |= {"BLOCK_G": 64, "MAX_PARTS": 8, "PREFIX_PARTS": 8, "BLOCK_H": 4, "NUM_HEADS": 40}


def build(kernel, num_warps, num_stages, cache="*bf16", **constants):
    return compiled(kernel, 90, num_warps, num_stages, cache, **constants).asm


def compiled(kernel, architecture, num_warps, num_stages, cache="*bf16", **constants):
    constants = {name: value for name, value in (MODEL | constants).items() if name in kernel.arg_names}
    signature = {}
    for name in kernel.arg_names:
        kind = "*i32"
        if constants.get(name) == "*bf16":
            kind = constants.pop(name)
        elif name in constants:
            kind = "constexpr"
        elif name == "scale":
            kind = "fp32"
        elif name in COUNTS:
            kind = "i32"
        elif name in FLOATS or (name == "out_ptr" and kernel is prefix_kernel):
            kind = "*fp32"
        elif name in HALVES:
            kind = cache if name in ("k_cache_ptr", "v_cache_ptr") else "*bf16"
        signature[name] = kind
    indices = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [name for name, kind in signature.items() if kind.startswith("*") or "stride" in name]
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(kernel, signature, indices, attributes)
    options = {"num_warps": num_warps, "num_stages": num_stages}
    return compile(source, target=GPUTarget("cuda", architecture, 32), options=options)

"""

HOPPER = """ALONE = {"SHARED": False, "shared_lens_ptr": None}
ALONE |= {"prefix_parts_ptr": None, "prefix_out_ptr": None, "prefix_lse_ptr": None}
for window, early, shared in ((0, True, ALONE), (100, False, ALONE), (0, True, {"SHARED": True})):
    options = {"WINDOW": window, "USE_PDL": early, **shared}
    loop = build(decode_kernel, 2, 3, BLOCK_M=16, **options)["ttgir"]
    assert loop.count("async_copy_global_to_local") >= 4, "the loop over tiles is pipelined"
    build(merge_kernel, 2, 3, BLOCK_P=1, **options)
    build(merge_kernel, 2, 3, BLOCK_R=16, BLOCK_H=1, BLOCK_P=8, **options)
build(decode_kernel, 4, 4, BLOCK_M=16, BLOCK_R=32, WINDOW=0, USE_PDL=True, **ALONE)
build(decode_kernel, 2, 3, BLOCK_M=16, WINDOW=0, USE_PDL=True, **ALONE, SINKS=True, sinks_ptr="*bf16")
for window in (0, 100):
    assert "wgmma" in build(prefill_kernel, 8, 3, BLOCK_M=128, WINDOW=window)["ptx"]
for heads in (1, 5):
    loop = build(fixed_split_kernel, 4, 3, BLOCK_M=16, WINDOW=0, HEADS=heads)["ttgir"]
    assert loop.count("async_copy_global_to_local") >= 2, "the loop over tiles is pipelined"
build(merge_splits_kernel, 4, 3, NUM_SPLITS=16, BLOCK_S=16)
PREFIX = ({"BLOCK_M": 64, "num_stages": 5, "GROUP": 2}, {"BLOCK_M": 128, "BLOCK_N": 32, "num_stages": 6})
for tile in PREFIX:
    assert "wgmma" in build(prefix_kernel, 4, USE_PDL=True, **tile)["ptx"]
for built in (
    build(decode_kernel, 2, 3, "*fp8e4nv", BLOCK_M=16, WINDOW=0, USE_PDL=True, **ALONE),
    build(prefill_kernel, 8, 3, "*fp8e4nv", BLOCK_M=128, WINDOW=0),
    *(build(prefix_kernel, 4, cache="*fp8e4nv", USE_PDL=True, **tile) for tile in PREFIX),
):
    assert built["ttgir"].count("async_copy_global_to_local") >= 4, "the loop over tiles is pipelined"
    assert "cvt.rn.f16x2.e4m3x2" in built["ptx"]
    assert "cvt.bf16.f16" not in built["ptx"], "which is a slow instruction"
"""


FIT = """
for architecture, limit in ((80, 163), (86, 99), (89, 99), (100, 227), (120, 99)):
    prefill = compiled(prefill_kernel, architecture, 8, 3, BLOCK_M=128, BLOCK_N=128, WINDOW=0)
    small = compiled(prefix_kernel, architecture, 4, 5, GROUP=2, BLOCK_M=64, USE_PDL=architecture >= 90)
    large = compiled(prefix_kernel, architecture, 4, 6, BLOCK_M=128, BLOCK_N=32, USE_PDL=architecture >= 90)
    for built in (prefill, small, large):
        assert 64 < built.metadata.shared / 1024 <= limit, (architecture, built.metadata)
"""


@pytest.mark.parametrize("checks", [HOPPER, FIT], ids=["all kernels for Hopper", "the largest tiles for others"])
def test_kernels_compile_without_a_gpu(checks: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    ran = subprocess.run(
        [sys.executable, "-c", COMPILE + checks], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
