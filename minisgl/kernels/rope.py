"""QK-norm, rotary embedding and KV store in one pass over memory.

The plain layers take about ten kernels for these, but all of it concerns one head of one token at a time. The twin is
the first half of `minisgl.layers.attention.Attention.forward`, with `KVCache.store`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args, to_kv_dtype

_MAX_HEADS = 8  # most heads of a program


def rotate_and_store(
    qkv: torch.Tensor,
    cos_sin_table: torch.Tensor,
    positions: torch.Tensor,
    out_locs: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, write keys and values to the cache, return the queries.

    Computes in float32 (float64 for a float64 model) and rounds once; the plain layers round after the norm and after
    each product, and round cos and sin themselves.

    Args:
        qkv: [T, (num_heads + 2 × num_kv_heads) × head_dim] output of the packed projection, each row contiguous.
        cos_sin_table: float32[max_positions, head_dim], `minisgl.layers.rotary.Rotary.table`.
        positions, out_locs: int32[T] as in `minisgl.batch.DeviceBatch`.
        k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim], one layer of a `KVCache`.
        q_norm, k_norm: [head_dim] weights of QK-norm where the model has it, both or neither.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads = min(_MAX_HEADS, triton.next_power_of_2(num_heads))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    half_block = triton.next_power_of_2(head_dim // 2)
    _rotate_and_store_kernel[(len(qkv), groups)](
        qkv,
        cos_sin_table,
        positions,
        out_locs,
        cos_sin_table if q_norm is None else q_norm,
        cos_sin_table if k_norm is None else k_norm,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        EPS=eps,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        HEAD_DIM=head_dim,
        HEADS=heads,
        HALF_BLOCK=half_block,
        NORM=q_norm is not None,
        DTYPE=compute_dtype(qkv.dtype),
        num_warps=2,
        **pdl_launch_args(qkv),
    )
    return q


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,  # [T, (NUM_HEADS + 2 × NUM_KV_HEADS) × HEAD_DIM]
    cos_sin_ptr: tl.tensor,  # float32[positions, HEAD_DIM], cos in the first half of a row, sin in the second
    positions_ptr: tl.tensor,  # int32[T]
    out_locs_ptr: tl.tensor,  # int32[T]
    q_weight_ptr: tl.tensor,  # [HEAD_DIM], read if NORM, as k_weight
    k_weight_ptr: tl.tensor,
    q_ptr: tl.tensor,  # [T, NUM_HEADS, HEAD_DIM]
    k_cache_ptr: tl.tensor,  # [locations, NUM_KV_HEADS, HEAD_DIM] of any dtype, as v_cache
    v_cache_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    EPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (t, g): HEADS heads of token t, all of them query heads, or key heads, or value heads.

    A rotation combines element i of a head's first half with element i of its second half, so heads are held as two
    tiles, [HEADS, HALF_BLOCK] each.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HALF_BLOCK)
    exists = columns < half

    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_sin_ptr + position * HEAD_DIM + columns, mask=exists, other=0.0).to(DTYPE)
    sin = tl.load(cos_sin_ptr + position * HEAD_DIM + half + columns, mask=exists, other=0.0).to(DTYPE)
    location = tl.load(out_locs_ptr + token).to(tl.int64)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    heads = tl.arange(0, HEADS)[:, None]
    within = heads * HEAD_DIM + columns[None, :]
    row_ptr = qkv_ptr + token * qkv_stride
    if group < q_groups:
        first = group * HEADS
        mask = (first + heads < NUM_HEADS) & exists[None, :]
        source = row_ptr + first * HEAD_DIM + within
        low, high = _load_halves(source, mask, half, DTYPE)
        if NORM:
            low, high = _normalise(low, high, q_weight_ptr, columns, exists, EPS, HEAD_DIM, DTYPE)
        q_target = q_ptr + (token * NUM_HEADS + first) * HEAD_DIM + within
        tl.store(q_target, low * cos - high * sin, mask=mask)
        tl.store(q_target + half, high * cos + low * sin, mask=mask)
    elif group < q_groups + kv_groups:
        first = (group - q_groups) * HEADS
        mask = (first + heads < NUM_KV_HEADS) & exists[None, :]
        source = row_ptr + (NUM_HEADS + first) * HEAD_DIM + within
        low, high = _load_halves(source, mask, half, DTYPE)
        if NORM:
            low, high = _normalise(low, high, k_weight_ptr, columns, exists, EPS, HEAD_DIM, DTYPE)
        target = k_cache_ptr + (location * NUM_KV_HEADS + first) * HEAD_DIM + within
        tl.store(target, to_kv_dtype(low * cos - high * sin, k_cache_ptr), mask=mask)
        tl.store(target + half, to_kv_dtype(high * cos + low * sin, k_cache_ptr), mask=mask)
    else:
        first = (group - q_groups - kv_groups) * HEADS
        mask = (first + heads < NUM_KV_HEADS) & exists[None, :]
        source = row_ptr + (NUM_HEADS + NUM_KV_HEADS + first) * HEAD_DIM + within
        low, high = _load_halves(source, mask, half, DTYPE)
        target = v_cache_ptr + (location * NUM_KV_HEADS + first) * HEAD_DIM + within
        tl.store(target, to_kv_dtype(low, v_cache_ptr), mask=mask)
        tl.store(target + half, to_kv_dtype(high, v_cache_ptr), mask=mask)


@triton.jit
def _load_halves(
    source: tl.tensor, mask: tl.tensor, half: tl.constexpr, DTYPE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    low = tl.load(source, mask=mask, other=0.0).to(DTYPE)
    high = tl.load(source + half, mask=mask, other=0.0).to(DTYPE)
    return low, high


@triton.jit
def _normalise(
    low: tl.tensor,
    high: tl.tensor,
    weight_ptr: tl.tensor,
    columns: tl.tensor,
    exists: tl.tensor,
    EPS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    half: tl.constexpr = HEAD_DIM // 2
    weight_low = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(DTYPE)
    weight_high = tl.load(weight_ptr + half + columns, mask=exists, other=0.0).to(DTYPE)
    mean_square = tl.sum(low * low + high * high, axis=1) / HEAD_DIM
    scale = tl.rsqrt(mean_square + EPS)[:, None]
    return low * scale * weight_low, high * scale * weight_high
