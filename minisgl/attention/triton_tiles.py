"""What our Triton attention kernels have in common: a tile of paged keys, and one step of the online softmax."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOG2_E = 1.4426950408889634

LOWEST = tl.constexpr(-3.0e38)
"""Where a running maximum starts: finite, so that subtracting it from −∞ (a masked score) is never NaN."""


def _interpreted_range(*bounds: Any) -> range:
    """`range` for the interpreter, whose numbers are arrays of one element; NumPy 2.4 does not take them for indices."""
    return range(*(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds))


tile_range = _interpreted_range if INTERPRETED.value else tl.range
"""`range` with bounds that are known only when a kernel runs."""


@triton.jit
def locate(page_row, positions, valid, PAGE_SIZE: tl.constexpr):
    """Where positions of one sequence are in the cache, int64: page id × page_size + offset.

    Args:
        page_row: pointer to the sequence's row of the page table.
        positions: int32[N].
        valid: bool[N] which of them exist; the others may point anywhere.
    """
    pages = tl.load(page_row + positions // PAGE_SIZE, valid, other=0)
    return pages.to(tl.int64) * PAGE_SIZE + positions % PAGE_SIZE


@triton.jit
def load_tile(cache, locations, valid, head, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """[N, BLOCK_D] keys or values of one KV head; zeros where not ``valid`` and past the head's width.

    Args:
        cache: pointer to a layer of the KV cache, [pages, page_size, KV_HEADS, HEAD_DIM].
        locations: int64[N], see `locate`.
        valid: bool[N]. What was never written may be NaN, which not even a weight of 0 would silence.
    """
    dims = tl.arange(0, BLOCK_D)
    pointers = cache + (locations * KV_HEADS + head)[:, None] * HEAD_DIM + dims[None, :]
    return tl.load(pointers, valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def softmax_step(queries, keys, values, visible, scale, acc, total, peak, MASKED: tl.constexpr):
    """Attend over one more tile of keys (online softmax, Milakov and Gimelshein 2018; FlashAttention, Dao et al. 2022).

    Args:
        queries, keys, values: [M, D], [N, D] and [N, D].
        visible: bool, broadcasts to [M, N], which query sees which key; looked at if ``MASKED``.
        scale: factor on q·k, times log2(e): a power of two is one instruction, a power of e is two.
        acc, total, peak: [M, D], [M] and [M] over the tiles so far: the weighted sum of the values, the sum of the
            weights, and the largest score, relative to which the weights are.

    Returns:
        The three after this tile.
    """
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        queries, keys, values = queries.to(tl.float32), keys.to(tl.float32), values.to(tl.float32)
    scores = tl.dot(queries, tl.trans(keys), input_precision="ieee") * scale
    if MASKED:
        scores = tl.where(visible, scores, float("-inf"))
    new_peak = tl.maximum(peak, tl.max(scores, 1))
    weights = tl.exp2(scores - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None]
    acc = tl.dot(weights.to(values.dtype), values, acc, input_precision="ieee")
    return acc, total, new_peak


@triton.jit
def add_part(part, part_lse, acc, total, peak):
    """Merge in attention over other keys of the same queries, of which only the result is known.

    A softmax over two sets of keys is the sum of the two results, each weighted by its share of the sum of weights.

    Args:
        part: [M, D] attention over the other keys.
        part_lse: [M] log2 of its sum of weights.
        acc, total, peak: as in `softmax_step`.
    """
    new_peak = tl.maximum(peak, part_lse)
    weight = tl.exp2(part_lse - new_peak)
    decay = tl.exp2(peak - new_peak)
    return acc * decay[:, None] + part * weight[:, None], total * decay + weight, new_peak
