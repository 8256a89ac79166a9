"""Mixture of experts: sort tokens by expert on the device, then run two grouped matrix products.

A *pair* is one token at one of its experts. A matrix product works on tiles of rows with the same weights, so we sort
the pairs by expert and cut those of each expert into tiles, of which the last may be partly empty.

Only the device knows how many tiles each expert gets, and a CUDA graph cannot wait for the host. So we launch as many
tiles as the worst routing needs, which depends on shapes alone, and the rest hold no rows. vLLM's fused mixture of
experts (Kwon et al. 2023) does the same with rows padded in memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, compute_dtype, pdl_launch_args, tile_range


class MoEPlan(NamedTuple):
    """Rows of a tile, and how the two products are cut."""

    block_m: int
    gate_up: GemmBlocks
    down: GemmBlocks


class GemmBlocks(NamedTuple):
    """How a product is cut: outputs and summands of a loop step, warps, and steps whose loads are in flight at once."""

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def fused_experts(
    x: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    experts: torch.Tensor,
    weights: torch.Tensor,
    plan: MoEPlan | None = None,
) -> torch.Tensor:
    """Sum of each token's experts, weighted: [T, hidden].

    Args:
        x: [T, hidden], each row contiguous.
        gate_up_proj, down_proj: [E, 2 × intermediate, hidden] and [E, hidden, intermediate], contiguous.
        experts, weights: int and float [T, k], contiguous.
        plan: None: `choose_moe_plan`.
    """
    num_tokens, top_k = experts.shape
    num_experts, hidden_size, intermediate_size = down_proj.shape
    plan = plan or choose_moe_plan(x.dtype, experts.numel(), num_experts)
    tiles = sort_by_expert(experts, num_experts, plan.block_m)
    between = torch.empty((experts.numel(), intermediate_size), dtype=x.dtype, device=x.device)
    _grouped_gemm(x, gate_up_proj, weights, between, tiles, top_k, plan.gate_up, gated=True)
    parts = torch.empty((experts.numel(), hidden_size), dtype=x.dtype, device=x.device)
    _grouped_gemm(between, down_proj, weights, parts, tiles, top_k, plan.down, gated=False)
    out = torch.empty((num_tokens, hidden_size), dtype=x.dtype, device=x.device)
    sum_parts(parts.view(num_tokens, top_k, hidden_size), out)
    return out


def sum_parts(parts: torch.Tensor, out: torch.Tensor) -> None:
    """Write the sum of each token's parts, [T, parts, size], to ``out``, [T, size]. Both contiguous."""
    num_tokens, num_parts, size = parts.shape
    block = min(triton.next_power_of_2(size), 512)
    _sum_parts_kernel[(num_tokens, triton.cdiv(size, block))](
        parts,
        out,
        TOP_K=num_parts,
        SIZE=size,
        PARTS=triton.next_power_of_2(num_parts),
        BLOCK=block,
        DTYPE=compute_dtype(out.dtype),
        **pdl_launch_args(out),
    )


def choose_moe_plan(dtype: torch.dtype, num_pairs: int, num_experts: int) -> MoEPlan:
    """Choose by the number of pairs that an expert has on average.

    With few pairs, reading weights takes longest: an expert's pairs should fit in one tile, so that its weights are
    read once, and many programs should load long pieces. With many pairs arithmetic takes longest: tiles are as large
    as the registers allow. The numbers follow from the sizes of Hopper (227 KB of shared memory and 64 Ki registers a
    multiprocessor, at least 64 rows in its fast matrix instruction) and of Qwen3-30B-A3B, not from measurements.
    """
    if dtype.itemsize > 2:  # no fast matrix instruction; the multiplications are unrolled
        return MoEPlan(16, GemmBlocks(32, 32, 4, 2), GemmBlocks(32, 32, 4, 2))
    mean = num_pairs // num_experts
    if mean < 8:
        return MoEPlan(16, GemmBlocks(32, 128, 4, 4), GemmBlocks(32, 128, 4, 4))
    if mean < 24:
        return MoEPlan(32, GemmBlocks(64, 128, 4, 3), GemmBlocks(64, 128, 4, 4))
    if mean < 96:
        return MoEPlan(64, GemmBlocks(64, 64, 4, 4), GemmBlocks(128, 64, 4, 4))
    return MoEPlan(128, GemmBlocks(128, 64, 8, 3), GemmBlocks(256, 64, 8, 3))


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """Sorted pairs in tiles. Tile t is ``pairs[begins[t] : min(begins[t] + block_m, ends[t])]``, which may be empty."""

    pairs: torch.Tensor  # int32[T × k]; pair p is token `p // k`
    experts: torch.Tensor  # int32[tiles] whose weights a tile meets
    begins: torch.Tensor  # int32[tiles] where a tile begins in `pairs`
    ends: torch.Tensor  # int32[tiles] end of its expert's pairs
    block_m: int  # most pairs of a tile


def sort_by_expert(experts: torch.Tensor, num_experts: int, block_m: int) -> ExpertTiles:
    """Sort pairs by expert, in tiles of at most ``block_m``. ``experts`` is int[T, k], contiguous."""
    num_pairs = experts.numel()
    num_tiles = min(num_pairs, num_experts + num_pairs // block_m)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=experts.device)
    tile_experts, begins, ends = torch.empty((3, num_tiles), dtype=torch.int32, device=experts.device)
    block = min(max(triton.next_power_of_2(num_pairs), 32), _MAX_SORT_BLOCK)
    _sort_pairs_kernel[(num_experts,)](
        experts,
        pairs,
        tile_experts,
        begins,
        ends,
        num_pairs,
        BLOCK_M=block_m,
        BLOCK=block,
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(experts),
    )
    return ExpertTiles(pairs, tile_experts, begins, ends, block_m)


_MAX_SORT_BLOCK = 2048


@triton.jit(do_not_specialize=["num_pairs"])
def _sort_pairs_kernel(
    experts_ptr: tl.tensor,  # int[num_pairs] expert of each pair
    pairs_ptr: tl.tensor,  # int32[num_pairs], written: sorted by expert, else in order
    tile_expert_ptr: tl.tensor,  # int32[tiles], written, as the next two: see `ExpertTiles`
    tile_begin_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    num_pairs: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program e: put the pairs of expert e behind those of all smaller ones, and cut them into tiles.

    It reads the list of pairs twice, BLOCK at a time: to count, then to write. Each program does so on its own, since
    the list is short and comes from the cache.
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

    first, stop = _first_tile(expert, begin, BLOCK_M), _first_tile(expert + 1, end, BLOCK_M)
    for start in tile_range(first, stop, BLOCK):
        tile = start + within
        tl.store(tile_expert_ptr + tile, expert, mask=tile < stop)
        tl.store(tile_begin_ptr + tile, begin + (tile - first) * BLOCK_M, mask=tile < stop)
        tl.store(tile_end_ptr + tile, end, mask=tile < stop)


@triton.jit
def _first_tile(expert: tl.tensor, begin: tl.tensor, BLOCK_M: tl.constexpr) -> tl.tensor:
    """First tile of an expert whose pairs start at ``begin``, whichever tiles the others really have.

    ``begin`` pairs fill no more than ``begin // BLOCK_M`` tiles, and each earlier expert has at most one that is not
    full. Nor can there be more tiles than pairs.
    """
    return tl.minimum(begin, expert + begin // BLOCK_M)


def _grouped_gemm(
    x: torch.Tensor,
    weight: torch.Tensor,
    pair_weights: torch.Tensor,
    out: torch.Tensor,
    tiles: ExpertTiles,
    top_k: int,
    blocks: GemmBlocks,
    gated: bool,
) -> None:
    size = out.shape[1]
    _grouped_gemm_kernel[(triton.cdiv(size, blocks.block_n), len(tiles.experts))](
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
        BLOCK_M=tiles.block_m,
        BLOCK_N=blocks.block_n,
        BLOCK_K=blocks.block_k,
        GATED=gated,
        DTYPE=compute_dtype(x.dtype),
        num_warps=blocks.num_warps,
        num_stages=blocks.num_stages,
        **pdl_launch_args(x),
    )


@triton.jit
def _grouped_gemm_kernel(
    x_ptr: tl.tensor,  # [T or pairs, K]
    weight_ptr: tl.tensor,  # [E, 2 N or N, K]
    pair_weight_ptr: tl.tensor,  # [pairs]
    out_ptr: tl.tensor,  # [pairs, N]
    pairs_ptr: tl.tensor,
    tile_expert_ptr: tl.tensor,
    tile_begin_ptr: tl.tensor,
    tile_end_ptr: tl.tensor,
    x_stride: tl.tensor,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GATED: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (n, t): the rows of tile t times BLOCK_N rows of its expert's weight, BLOCK_K of their length at a time.

    Between the two products, row i belongs to sorted pair i. The first product, GATED, reads the token of pair i. Row n
    of an expert's weight is the gate of output n, row N + n its up projection; ``out[i] = silu(gate) × up``. The second
    reads row i, multiplies the result by the pair's weight, and writes it to row ``pairs[i]``: the rows of a token are
    side by side again.
    """
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(1)
    begin, end = tl.load(tile_begin_ptr + tile), tl.load(tile_end_ptr + tile)
    if begin >= end:
        return

    place = begin + tl.arange(0, BLOCK_M)
    is_row = place < end
    pair = tl.load(pairs_ptr + place, mask=is_row, other=0)
    source = (pair // TOP_K if GATED else place).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_column = column < N
    along = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + source[:, None] * x_stride + along[None, :]
    row_of_weight = tl.load(tile_expert_ptr + tile).to(tl.int64) * (2 * N if GATED else N) + column
    weight_tile = weight_ptr + row_of_weight[:, None] * K + along[None, :]

    out = tl.zeros((BLOCK_M, BLOCK_N), dtype=DTYPE)
    up = out
    for start in range(0, K, BLOCK_K):
        x_mask, weight_mask = is_row[:, None], is_column[:, None]
        if K % BLOCK_K != 0:
            inside = (start + along < K)[None, :]
            x_mask, weight_mask = x_mask & inside, weight_mask & inside
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)
        out = _dot(x, tl.load(weight_tile + start, mask=weight_mask, other=0.0), out)
        if GATED:
            up = _dot(x, tl.load(weight_tile + N * K + start, mask=weight_mask, other=0.0), up)

    if GATED:
        out = out / (1.0 + tl.exp(-out)) * up
        target = place
    else:
        out *= tl.load(pair_weight_ptr + pair, mask=is_row, other=0.0).to(DTYPE)[:, None]
        target = pair
    tl.store(
        out_ptr + target.to(tl.int64)[:, None] * N + column[None, :], out, mask=is_row[:, None] & is_column[None, :]
    )


@triton.jit
def _dot(x: tl.tensor, weight: tl.tensor, total: tl.tensor) -> tl.tensor:
    """``total + x weightᵀ``: [BLOCK_M, BLOCK_K] and [BLOCK_N, BLOCK_K] → [BLOCK_M, BLOCK_N]."""
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        x, weight = x.to(total.dtype), weight.to(total.dtype)
    return tl.dot(x, tl.trans(weight), total, input_precision="ieee", out_dtype=total.dtype)


@triton.jit
def _sum_parts_kernel(
    parts_ptr: tl.tensor,  # [T, TOP_K, SIZE]
    out_ptr: tl.tensor,  # [T, SIZE]
    TOP_K: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,  # the power of two that TOP_K fits in
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (t, b): BLOCK columns of token t, ``out[t] = Σ parts[t]``."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    part = tl.arange(0, PARTS)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    mask = (part < TOP_K)[:, None] & (column < SIZE)[None, :]
    parts = tl.load(parts_ptr + (token * TOP_K + part)[:, None] * SIZE + column[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + token * SIZE + column, tl.sum(parts.to(DTYPE), axis=0), mask=column < SIZE)
