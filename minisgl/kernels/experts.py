"""Who goes through which expert, sorted on the device into tiles.

A *pair* is one token at one of its experts: T tokens with k experts each are T × k pairs. A matrix product works on
tiles of rows that all meet the same weights, so the pairs are sorted by expert, and those of each expert are cut into
tiles, the last of which may be partly empty.

How many tiles an expert gets is known to the device alone. A host that asked would wait for it, and a CUDA graph cannot
wait. So here the number of tiles depends on shapes alone: it is what the worst routing needs, and tiles that are left
over hold no rows. vLLM's fused mixture of experts (Kwon et al. 2023) has the same idea, with rows padded in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, pdl_launch_args, tile_range, wide

_LARGEST_BLOCK = 2048


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_kernel(
    experts_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_begin_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    num_pairs: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program e: put the pairs of expert e behind those of all smaller ones, and cut them into tiles.

    It reads the list of pairs twice, BLOCK at a time: to count, then to write. Each program does so for itself, since
    the list is short and comes from the cache.

    experts: int[num_pairs] expert of each pair. pairs: int32[num_pairs], sorted by expert, else in order. tile_*:
    int32[tiles], see `ExpertTiles`.
    """
    expert = tl.program_id(0)
    within = tl.arange(0, BLOCK)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    smaller = tl.zeros((BLOCK,), dtype=tl.int32)
    own = tl.zeros((BLOCK,), dtype=tl.int32)
    for start in tile_range(0, num_pairs, BLOCK):
        pair = start + within
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0))
        smaller += (chosen < expert).to(tl.int32)
        own += (chosen == expert).to(tl.int32)
    begin = tl.sum(smaller, axis=0)
    end = begin + tl.sum(own, axis=0)

    written = begin
    for start in tile_range(0, num_pairs, BLOCK):
        pair = start + within
        chosen = tl.load(experts_ptr + pair, mask=pair < num_pairs, other=tl.num_programs(0))
        is_own = (chosen == expert).to(tl.int32)
        tl.store(pairs_ptr + written + tl.cumsum(is_own, axis=0) - 1, pair, mask=is_own == 1)
        written += tl.sum(is_own, axis=0)

    first, stop = _first_tile(expert, begin, ROWS), _first_tile(expert + 1, end, ROWS)
    for start in tile_range(first, stop, BLOCK):
        tile = start + within
        tl.store(tile_expert_ptr + tile, expert, mask=tile < stop)
        tl.store(tile_begin_ptr + tile, begin + (tile - first) * ROWS, mask=tile < stop)
        tl.store(tile_end_ptr + tile, end, mask=tile < stop)


@triton.jit
def _first_tile(expert: tl.tensor, begin: tl.tensor, ROWS: tl.constexpr) -> tl.tensor:
    """Where the tiles of an expert start whose pairs start at ``begin``, without asking how many the others have.

    ``begin`` pairs fill no more than ``begin // ROWS`` tiles, and each expert before has at most one that is not full.
    Nor do they need more tiles than there are pairs.
    """
    return tl.minimum(begin, expert + begin // ROWS)


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Pairs, sorted and cut. Tile t is ``pairs[begins[t] : min(begins[t] + rows, ends[t])]``, which may be nothing.

    Args:
        pairs: int32[T × k]; pair p is token ``p // k``.
        experts: int32[tiles] whose weights a tile meets.
        begins, ends: int32[tiles] the first place of a tile, and the one behind its expert's last pair.
        rows: most pairs of a tile.
    """

    pairs: torch.Tensor
    experts: torch.Tensor
    begins: torch.Tensor
    ends: torch.Tensor
    rows: int


def expert_tiles(experts: torch.Tensor, num_experts: int, rows: int) -> ExpertTiles:
    """Sort pairs by expert.

    Args:
        experts: int[T, k] experts of each token, contiguous.
        num_experts: E.
        rows: most pairs of a tile.
    """
    num_pairs = experts.numel()
    num_tiles = min(num_pairs, num_experts + num_pairs // rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tile_experts, begins, ends = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    block = min(max(triton.next_power_of_2(num_pairs), 32), _LARGEST_BLOCK)
    _sort_kernel[(num_experts,)](
        experts,
        pairs,
        tile_experts,
        begins,
        ends,
        num_pairs,
        ROWS=rows,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(experts),
    )
    return ExpertTiles(pairs, tile_experts, begins, ends, rows)


@triton.jit
def _product_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    pair_weight_ptr: tl.tensor,
    out_ptr: tl.tensor,
    pairs_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_begin_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (n, t): the rows of tile t times BLOCK_N rows of its expert's weight, BLOCK_K of their length at a time.

    Sorted pair i is row i of what is between the two products.
    GATED, the first: reads the token of pair i. Row n of an expert's weight is the gate of output n, row N + n its up
    projection; ``out[i] = silu(gate) × up``.
    Else, the second: reads row i. The result, times the pair's weight, is row ``pairs[i]`` of ``out``: the rows of a
    token are side by side again.

    x: [T or pairs, K] with any row stride. weight: [E, 2 N or N, K]. pair_weight: [pairs]. out: [pairs, N].
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    begin, end = tl.load(tile_begin_ptr + tile), tl.load(tile_end_ptr + tile)
    if begin >= end:
        return

    place = begin + tl.arange(0, ROWS)
    is_row = place < end
    pair = tl.load(pairs_ptr + place, mask=is_row, other=0)
    source = (pair // TOP_K if GATED else place).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    along = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + source[:, None] * x_stride + along[None, :]
    row_of_weight = tl.load(tile_expert_ptr + tile).to(tl.int64) * (2 * N if GATED else N) + column
    weight_tile = weight_ptr + row_of_weight[:, None] * K + along[None, :]

    out = tl.zeros((ROWS, BLOCK_N), dtype=WIDE)
    up = out
    for start in range(0, K, BLOCK_K):
        x_mask, weight_mask = is_row[:, None], is_column[:, None]
        if K % BLOCK_K != 0:
            inside = (start + along < K)[None, :]
            x_mask, weight_mask = x_mask & inside, weight_mask & inside
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)
        out = _multiply_add(x, tl.load(weight_tile + start, mask=weight_mask, other=0.0), out)
        if GATED:
            up = _multiply_add(x, tl.load(weight_tile + N * K + start, mask=weight_mask, other=0.0), up)

    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
        target = place
    else:
        out *= tl.load(pair_weight_ptr + pair, mask=is_row, other=0.0).to(WIDE)[:, None]
        target = pair
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * N + column[None, :], out, mask=is_row[:, None] & is_column[None, :]
    )


@triton.jit
def _multiply_add(x: tl.tensor, weight: tl.tensor, total: tl.tensor) -> tl.tensor:
    """``total + x weightᵀ``: [ROWS, BLOCK_K] and [BLOCK_N, BLOCK_K] → [ROWS, BLOCK_N]."""
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        x, weight = x.to(total.dtype), weight.to(total.dtype)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _sum_kernel(
    parts_ptr: tl.tensor,
    out_ptr: tl.tensor,
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (t, b): BLOCK columns of token t, ``out[t] = Σ parts[t]``.

    parts: [T, TOP_K, SIZE]. out: [T, SIZE]. PARTS: the power of two that TOP_K fits in.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mask = (part < TOP_K)[:, None] & (column < SIZE)[None, :]
    parts = tl.load(parts_ptr + (token * TOP_K + part)[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + token * SIZE + column, tl.sum(parts.to(WIDE), axis=0), mask=column < SIZE)


class Blocks(NamedTuple):
    """How a product is cut: outputs and summands of a step of the loop, threads, and steps whose loads are on the way
    at the same time."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


class Plan(NamedTuple):
    """Rows of a tile, and how the two products are cut."""

    rows: int
    gate_up: Blocks
    down: Blocks


def choose_plan(dtype: torch.dtype, num_pairs: int, num_experts: int) -> Plan:
    """By the number of pairs that an expert has on average.

    As long as they are few, reading weights takes longest: an expert's pairs should fit in one tile, so that its
    weights are read once, and programs should be many, with long pieces of weights on the way. With many pairs
    multiplying takes longest: tiles are as large as the registers can hold sums for, so that each value that is loaded
    is used in many products.

    These follow from Hopper's sizes (227 KB of shared memory and 64 Ki registers a multiprocessor, products of at least
    64 rows in its fast matrix instruction) and Qwen3-30B-A3B's, not from measurements.
    """
    if dtype.itemsize > 2:  # no fast matrix instruction; the multiplications are unrolled
        return Plan(16, Blocks(32, 32, 4, 2), Blocks(32, 32, 4, 2))
    mean = num_pairs // num_experts
    if mean < 8:
        return Plan(16, Blocks(32, 128, 4, 4), Blocks(32, 128, 4, 4))
    if mean < 24:
        return Plan(32, Blocks(64, 128, 4, 3), Blocks(64, 128, 4, 4))
    if mean < 96:
        return Plan(64, Blocks(64, 64, 4, 4), Blocks(128, 64, 4, 4))
    return Plan(128, Blocks(128, 64, 8, 3), Blocks(256, 64, 8, 3))


def sum_of_experts(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    plan: Plan | None = None,
) -> torch.Tensor:
    """Sum of each token's experts, weighted.

    Args:
        x: [T, hidden], each row contiguous.
        gate_up_proj: [E, 2 × intermediate, hidden], contiguous.
        down_proj: [E, hidden, intermediate], contiguous.
        experts: int[T, k] expert ids, contiguous.
        weights: [T, k], contiguous.
        plan: None is `choose_plan`.

    Returns:
        [T, hidden].
    """
    num_tokens, top_k = experts.shape
    num_experts, hidden_size, intermediate_size = down_proj.shape
    plan = plan or choose_plan(x.dtype, experts.numel(), num_experts)
    tiles = expert_tiles(experts, num_experts, plan.rows)
    between = torch.empty((experts.numel(), intermediate_size), dtype=x.dtype, device=x.device)
    _product(x, gate_up_proj, weights, between, tiles, top_k, plan.gate_up, gated=True)
    parts = torch.empty((experts.numel(), hidden_size), dtype=x.dtype, device=x.device)
    _product(between, down_proj, weights, parts, tiles, top_k, plan.down, gated=False)
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    block = min(triton.next_power_of_2(hidden_size), 512)
    _sum_kernel[(num_tokens, triton.cdiv(hidden_size, block))](
        parts,
        out,
        TOP_K=top_k,
        SIZE=hidden_size,
        PARTS=triton.next_power_of_2(top_k),
        BLOCK=block,
        WIDE=wide(x.dtype),
        **pdl_launch_args(x),
    )
    return out


def _product(
    x: torch.Tensor,
    weight: torch.Tensor,
    pair_weights: torch.Tensor,
    out: torch.Tensor,
    tiles: ExpertTiles,
    top_k: int,
    blocks: Blocks,
    gated: bool,
) -> None:
    """Launch `_product_kernel`."""
    size = out.shape[1]
    _product_kernel[(triton.cdiv(size, blocks.block_n), len(tiles.experts))](
        x,
        weight,
        pair_weights,
        out,
        tiles.pairs,
        tiles.experts,
        tiles.begins,
        tiles.ends,
        x.stride(0),
        TOP_K=top_k,
        N=size,
        K=weight.shape[2],
        ROWS=tiles.rows,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        GATED=gated,
        WIDE=wide(x.dtype),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **pdl_launch_args(x),
    )
