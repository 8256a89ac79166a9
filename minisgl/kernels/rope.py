"""QK-norm, rotary embedding and KV store in one pass over memory.

Between the packed q, k and v projection and attention, the plain layers launch about ten kernels: two norms, their
concatenation, the rotation's products, and the two stores. All of that concerns one head of one token at a time, so
one kernel does it in registers. Its twin is the first half of `minisgl.layers.Attention.forward` and
`minisgl.kvcache.kv_cache.KVCache.store`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args, to_kv_dtype, wide

_HEADS_PER_PROGRAM = 8


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    table_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    out_locs_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    qkv_stride: tl.tensor,
    EPS: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS: tl.constexpr,
    HALF_BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program a token and HEADS heads, all of them query heads, or key heads, or value heads.

    A rotation turns element i of a head's first half together with element i of its second half, so heads are held as
    two tiles, [HEADS, HALF_BLOCK] each.

    qkv: [T, (NUM_HEADS + 2 × NUM_KV_HEADS) × HEAD_DIM] with any row stride. table: float32[positions, HEAD_DIM], cos
    in the first half of a row, sin in the second. positions, out_locs: int32[T]. Weights: [HEAD_DIM], read if NORM.
    q: [T, NUM_HEADS, HEAD_DIM]. Caches: [locations, NUM_KV_HEADS, HEAD_DIM], of any dtype.
    """
    token = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1)
    q_groups: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    kv_groups: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    half: tl.constexpr = HEAD_DIM // 2
    columns = tl.arange(0, HALF_BLOCK)
    exists = columns < half

    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(table_ptr + position * HEAD_DIM + columns, mask=exists, other=0.0).to(WIDE)
    sin = tl.load(table_ptr + position * HEAD_DIM + half + columns, mask=exists, other=0.0).to(WIDE)
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
        low, high = _load_halves(source, mask, half, WIDE)
        if NORM:
            low, high = _normalise(low, high, q_weight_ptr, columns, exists, EPS, HEAD_DIM, WIDE)
        q_target = q_ptr + (token * NUM_HEADS + first) * HEAD_DIM + within
        tl.store(q_target, low * cos - high * sin, mask=mask)
        tl.store(q_target + half, high * cos + low * sin, mask=mask)
    elif group < q_groups + kv_groups:
        first = (group - q_groups) * HEADS
        mask = (first + heads < NUM_KV_HEADS) & exists[None, :]
        source = row_ptr + (NUM_HEADS + first) * HEAD_DIM + within
        low, high = _load_halves(source, mask, half, WIDE)
        if NORM:
            low, high = _normalise(low, high, k_weight_ptr, columns, exists, EPS, HEAD_DIM, WIDE)
        target = k_cache_ptr + (location * NUM_KV_HEADS + first) * HEAD_DIM + within
        tl.store(target, to_kv_dtype(low * cos - high * sin, k_cache_ptr), mask=mask)
        tl.store(target + half, to_kv_dtype(high * cos + low * sin, k_cache_ptr), mask=mask)
    else:
        first = (group - q_groups - kv_groups) * HEADS
        mask = (first + heads < NUM_KV_HEADS) & exists[None, :]
        source = row_ptr + (NUM_HEADS + NUM_KV_HEADS + first) * HEAD_DIM + within
        low, high = _load_halves(source, mask, half, WIDE)
        target = v_cache_ptr + (location * NUM_KV_HEADS + first) * HEAD_DIM + within
        tl.store(target, to_kv_dtype(low, v_cache_ptr), mask=mask)
        tl.store(target + half, to_kv_dtype(high, v_cache_ptr), mask=mask)


@triton.jit
def _load_halves(
    source: tl.tensor, mask: tl.tensor, half: tl.constexpr, WIDE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """The two halves of some heads, [HEADS, HALF_BLOCK] each."""
    low = tl.load(source, mask=mask, other=0.0).to(WIDE)
    high = tl.load(source + half, mask=mask, other=0.0).to(WIDE)
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
    WIDE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """RMSNorm of each head over both of its halves."""
    half: tl.constexpr = HEAD_DIM // 2
    weight_low = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(WIDE)
    weight_high = tl.load(weight_ptr + half + columns, mask=exists, other=0.0).to(WIDE)
    mean_square = tl.sum(low * low + high * high, axis=1) / HEAD_DIM
    scale = tl.rsqrt(mean_square + EPS)[:, None]
    return low * scale * weight_low, high * scale * weight_high


def rotate_and_store(
    qkv: torch.Tensor,
    table: torch.Tensor,
    positions: torch.Tensor,
    out_locs: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Normalise and rotate queries and keys, and write keys and values to the cache.

    Everything between the load and the store is float32 (float64 for a float64 model), with one rounding at the end;
    the plain layers round to the model's dtype after the norm, after each product, and cos and sin themselves.

    Args:
        qkv: [T, (num_heads + 2 × num_kv_heads) × head_dim] output of the packed projection, each row contiguous.
        table: float32[max_positions, head_dim], `minisgl.layers.rotary.Rotary.table`.
        positions, out_locs: [T] int32 as in `minisgl.batch.DeviceBatch`.
        k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim], one layer of a `KVCache`.
        q_norm, k_norm: [head_dim] weights of QK-norm where the model has it, both or neither.
        eps: of both norms.

    Returns:
        [T, num_heads, head_dim] queries.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    num_heads = qkv.shape[1] // head_dim - 2 * num_kv_heads
    q = torch.empty((len(qkv), num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    heads = min(_HEADS_PER_PROGRAM, triton.next_power_of_2(num_heads))
    groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
    half_block = triton.next_power_of_2(head_dim // 2)
    _rotate_and_store_kernel[(len(qkv), groups)](
        qkv,
        table,
        positions,
        out_locs,
        table if q_norm is None else q_norm,
        table if k_norm is None else k_norm,
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
        WIDE=wide(qkv.dtype),
        num_warps=2,
        **pdl_launch_args(qkv),
    )
    return q
