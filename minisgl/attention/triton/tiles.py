"""What the Triton attention kernels share: loading a tile of paged keys and values, and the online softmax.

A kernel visits the keys of a query tile by tile. It keeps three running values for each query: ``row_max``, the largest
score; ``row_sum``, the sum of the weights relative to it; and ``acc``, the weighted sum of the values. The output is
``acc / row_sum``, and its log-sum-exp (base 2) is ``row_max + log2(row_sum)``.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, tile_range

LOG2_E = 1.4426950408889634

# Where a running maximum starts: finite, so that subtracting it from −∞ (a masked score) is never NaN.
LOWEST = tl.constexpr(-3.0e38)


@triton.jit
def load_tile(
    k_cache_ptr,  # a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    page_row,  # pointer to the sequence's row of the page table
    kv_head,
    positions,  # int32[N]
    end,  # positions from here on give zeros: unwritten memory may hold NaN, and 0 × NaN is NaN
    MASKED: tl.constexpr,  # False if all positions are before `end`
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Load keys and values of one sequence at ``positions`` in one KV head, [N, BLOCK_D] each."""
    dims = tl.arange(0, BLOCK_D)
    valid = positions < end
    if MASKED:
        pages = tl.load(page_row + positions // PAGE_SIZE, valid, other=0)
    else:
        pages = tl.load(page_row + positions // PAGE_SIZE)
    locations = pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE
    offsets = (locations * KV_HEADS + kv_head)[:, None] * HEAD_DIM + dims[None, :]
    if MASKED or BLOCK_D > HEAD_DIM:
        mask = valid[:, None] & (dims < HEAD_DIM)[None, :]
        k = tl.load(k_cache_ptr + offsets, mask, other=0.0)
        v = tl.load(v_cache_ptr + offsets, mask, other=0.0)
    else:
        k = tl.load(k_cache_ptr + offsets)
        v = tl.load(v_cache_ptr + offsets)
    return k, v


@triton.jit
def attend_keys(
    q,  # [M, BLOCK_D]
    k_cache_ptr,  # this and the next two as in `load_tile`
    v_cache_ptr,
    page_row,
    kv_head,
    begin,
    end,
    visible_end,  # int32[M] or [1]: each query sees the keys before this position, the last WINDOW of them
    scale,  # factor on q·k, not negative, × log2(e): exp2 is one instruction, exp is two
    acc,  # float32[M, BLOCK_D]
    row_sum,  # float32[M]
    row_max,  # float32[M]
    MASKED: tl.constexpr,  # False if all queries see all of these keys, which are whole tiles
    WINDOW: tl.constexpr,  # 0: no sliding window
    PAGE_SIZE: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Attend to the keys ``begin … end`` of one sequence in one KV head; return the three running values."""
    for start in tile_range(begin, end, BLOCK_N):
        positions = start + tl.arange(0, BLOCK_N)
        k, v = load_tile(
            k_cache_ptr, v_cache_ptr, page_row, kv_head, positions, end, MASKED, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_D
        )
        visible = positions[None, :] < visible_end[:, None]
        if WINDOW > 0:
            visible &= positions[None, :] >= visible_end[:, None] - WINDOW
        acc, row_sum, row_max = softmax_step(q, k, v, visible, scale, acc, row_sum, row_max, MASKED)
    return acc, row_sum, row_max


@triton.jit
def running_values(sinks_ptr, heads, exists, begins, SINKS: tl.constexpr, BLOCK_M: tl.constexpr):
    """``row_sum`` and ``row_max`` before the first key: nothing, or a head's sink where a row ``begins``."""
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    if SINKS:
        sinks = tl.load(sinks_ptr + heads, exists, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
        row_sum = tl.where(begins, row_sum + 1.0, row_sum)
        row_max = tl.where(begins, sinks, row_max)
    return row_sum, row_max


@triton.jit
def softmax_step(q, k, v, visible, scale, acc, row_sum, row_max, MASKED: tl.constexpr):
    """Attend to one tile of keys (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).

    Args:
        q, k, v: [M, D], [N, D] and [N, D], the latter two in any dtype.
        visible: bool, broadcasts to [M, N]: which query sees which key; used only if MASKED.
        scale, acc, row_sum, row_max: as in `attend_keys`; returned with this tile included.
    """
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        q = q.to(tl.float32)
    elif k.dtype == tl.float8e4nv and q.dtype == tl.bfloat16:
        q = q.to(tl.float16)  # the GPU has instructions from eight bits to this, and none to bfloat16
    k, v = k.to(q.dtype), v.to(q.dtype)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if MASKED:
        scores = tl.where(visible, scores * scale, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - new_max[:, None])
    else:  # one multiplication a row in place of one a score; the other is part of a fused multiply-add
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weights, 1)
    acc = acc * rescale[:, None]
    acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    return acc, row_sum, new_max
