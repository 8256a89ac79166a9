"""All of attention between the two projections for a single token, in two kernels.

First QK-norm, rotary embedding, KV store and attention over splits of the keys (FlashDecoding, Dao et al. 2023), then
the merge of the splits. The twin is `minisgl.layers.attention.Attention` without its projections.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, from_kv_dtype, pdl_launch_args, tile_range, to_kv_dtype

MAX_SPLITS = 16  # most programs that share one KV head's keys
_BLOCK_N = 64  # keys that a program takes at a time


class SingleTokenAttention:
    """The kernels and their scratch memory, for all layers of a model; ``head_dim`` is a power of two."""

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads, self.group, self.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        precise = torch.promote_types(dtype, torch.float32)
        self._split_out = torch.empty((MAX_SPLITS, num_heads, head_dim), dtype=precise, device=device)
        self._split_lse = torch.empty((MAX_SPLITS, num_heads), dtype=precise, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        cos_sin_table: torch.Tensor,
        slot: torch.Tensor,
        seq_len: torch.Tensor,
        page_table: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Attend and store one token of one layer.

        Args:
            qkv: [(num_heads + 2 × num_kv_heads) × head_dim] output of the packed projection.
            norms: weights of QK-norm, [head_dim] each; None without.
            cos_sin_table: float32[positions, head_dim], `Rotary.table`.
            slot, seq_len: int32[1] row in the page table, and tokens with this one.
            page_table: int32[rows, pages].
            k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim] of the layer.
            scale, window: as in `AttentionSpec`.
            out: [num_heads × head_dim], written.
        """
        q_norm, k_norm = norms or (qkv, qkv)
        _split_attention_kernel[(self.kv_heads, MAX_SPLITS)](
            qkv,
            q_norm,
            k_norm,
            cos_sin_table,
            slot,
            seq_len,
            page_table,
            k_cache,
            v_cache,
            self._split_out,
            self._split_lse,
            page_table.stride(0),
            scale,
            eps,
            WINDOW=window or 0,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            GROUP_BLOCK=max(16, triton.next_power_of_2(self.group)),
            HEAD_DIM=self.head_dim,
            PAGE_SIZE=k_cache.shape[1],
            MAX_SPLITS=MAX_SPLITS,
            BLOCK_N=_BLOCK_N,
            NORM=norms is not None,
            DTYPE=compute_dtype(qkv.dtype),
            num_warps=4,
            **pdl_launch_args(qkv.unsqueeze(0)),
        )
        _merge_splits_kernel[(self.kv_heads * self.group,)](
            self._split_out,
            self._split_lse,
            seq_len,
            out,
            WINDOW=window or 0,
            HEADS=self.kv_heads * self.group,
            HEAD_DIM=self.head_dim,
            MAX_SPLITS=MAX_SPLITS,
            BLOCK_N=_BLOCK_N,
            num_warps=4,
            **pdl_launch_args(qkv.unsqueeze(0)),
        )


@triton.jit
def _split_attention_kernel(
    qkv_ptr: tl.tensor,  # [(GROUP + 2) × KV_HEADS × HEAD_DIM]
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    cos_sin_ptr: tl.tensor,  # float32[positions, HEAD_DIM], cos in the first half
    slot_ptr: tl.tensor,  # int32[1]
    seq_len_ptr: tl.tensor,  # int32[1], this token included
    page_table_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,  # [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM] of any dtype, as v_cache
    v_cache_ptr: tl.tensor,
    split_out_ptr: tl.tensor,  # [MAX_SPLITS, heads, HEAD_DIM] attention over each split, written
    split_lse_ptr: tl.tensor,  # [MAX_SPLITS, heads] logarithm of its sum of weights, written
    table_width: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NORM: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (h, s): the query heads of KV head h over the s-th split of its keys.

    The program of the last split also normalises and rotates the token's own key, and stores key and value. Heads are
    held in two halves, because rotary embedding pairs their elements that way; a dot product is the sum of those of the
    halves.
    """
    kv_head, split = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, HALF)
    full = tl.arange(0, HEAD_DIM)
    group = tl.arange(0, GROUP_BLOCK)
    position = tl.load(seq_len_ptr) - 1
    page_row = page_table_ptr + tl.load(slot_ptr).to(tl.int64) * table_width

    first_key, split_size, num_splits = _split_range(position, WINDOW, MAX_SPLITS, BLOCK_N)
    begin = first_key + split * split_size
    stop = tl.minimum(begin + split_size, position)  # earlier tokens only

    # What earlier steps have left can be fetched before this step's query is there.
    cos_sin = cos_sin_ptr + position.to(tl.int64) * HEAD_DIM + half
    cos, sin = tl.load(cos_sin).to(DTYPE), tl.load(cos_sin + HALF).to(DTYPE)
    q_norm1, q_norm2, k_norm1, k_norm2 = cos, cos, cos, cos
    if NORM:
        q_norm1, q_norm2 = tl.load(q_norm_ptr + half).to(DTYPE), tl.load(q_norm_ptr + HALF + half).to(DTYPE)
        k_norm1, k_norm2 = tl.load(k_norm_ptr + half).to(DTYPE), tl.load(k_norm_ptr + HALF + half).to(DTYPE)
    k1, k2, v, visible = _load_block(
        k_cache_ptr, v_cache_ptr, page_row, begin, stop, position, kv_head,
        WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N,
    )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if split < num_splits:
        q_ptr = qkv_ptr + (kv_head * GROUP + group[:, None]) * HEAD_DIM + half[None, :]
        k_ptr = qkv_ptr + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        in_group = group < GROUP
        q1 = tl.load(q_ptr, mask=in_group[:, None], other=0.0).to(DTYPE)
        q2 = tl.load(q_ptr + HALF, mask=in_group[:, None], other=0.0).to(DTYPE)
        own1, own2 = tl.load(k_ptr + half).to(DTYPE), tl.load(k_ptr + HALF + half).to(DTYPE)
        own_v = tl.load(k_ptr + KV_HEADS * HEAD_DIM + full)
        q1, q2 = _norm_and_rotate(
            q1, q2, q_norm1[None, :], q_norm2[None, :], cos[None, :], sin[None, :], eps, HEAD_DIM, NORM
        )

        row_max = tl.full((GROUP_BLOCK,), -float("inf"), dtype=DTYPE)
        row_sum = tl.zeros((GROUP_BLOCK,), dtype=DTYPE)
        acc = tl.zeros((GROUP_BLOCK, HEAD_DIM), dtype=DTYPE)
        narrow = qkv_ptr.dtype.element_ty
        narrow_q1, narrow_q2 = q1.to(narrow), q2.to(narrow)
        for start in tile_range(begin, stop, BLOCK_N):
            lower = tl.dot(narrow_q1, from_kv_dtype(k1, narrow), input_precision="ieee", out_dtype=tl.float32)
            upper = tl.dot(narrow_q2, from_kv_dtype(k2, narrow), input_precision="ieee", out_dtype=tl.float32)
            scores = lower.to(DTYPE) + upper.to(DTYPE)
            scores = tl.where(visible[None, :], scores * scale, -float("inf"))
            new_max = tl.maximum(row_max, tl.max(scores, axis=1))
            # A block may be hidden as a whole by the window; −∞ − −∞ would be NaN.
            base = tl.where(new_max == -float("inf"), 0.0, new_max)
            weights = tl.exp(scores - base[:, None])
            rescale = tl.exp(row_max - base)
            row_sum = row_sum * rescale + tl.sum(weights, axis=1)
            block_v = from_kv_dtype(v, narrow)
            product = tl.dot(weights.to(narrow), block_v, input_precision="ieee", out_dtype=tl.float32)
            acc = acc * rescale[:, None] + product.to(DTYPE)
            row_max = new_max
            k1, k2, v, visible = _load_block(
                k_cache_ptr, v_cache_ptr, page_row, start + BLOCK_N, stop, position, kv_head,
                WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK_N,
            )  # fmt: skip

        if split == num_splits - 1:
            own1, own2 = _norm_and_rotate(own1, own2, k_norm1, k_norm2, cos, sin, eps, HEAD_DIM, NORM)
            stored1, stored2 = to_kv_dtype(own1, k_cache_ptr), to_kv_dtype(own2, k_cache_ptr)
            stored_v = to_kv_dtype(own_v, v_cache_ptr)
            page = tl.load(page_row + position // PAGE_SIZE).to(tl.int64)
            offset = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
            tl.store(k_cache_ptr + offset + half, stored1)
            tl.store(k_cache_ptr + offset + HALF + half, stored2)
            tl.store(v_cache_ptr + offset + full, stored_v)
            own1, own2 = from_kv_dtype(stored1, DTYPE), from_kv_dtype(stored2, DTYPE)  # what later steps will see
            score = (tl.sum(q1 * own1[None, :], axis=1) + tl.sum(q2 * own2[None, :], axis=1)) * scale
            new_max = tl.maximum(row_max, score)
            rescale, weight = tl.exp(row_max - new_max), tl.exp(score - new_max)
            row_sum = row_sum * rescale + weight
            acc = acc * rescale[:, None] + weight[:, None] * from_kv_dtype(stored_v, DTYPE)[None, :]
            row_max = new_max

        seen = row_sum > 0.0
        acc = acc / tl.where(seen, row_sum, 1.0)[:, None]
        lse = tl.where(seen, row_max + tl.log(tl.where(seen, row_sum, 1.0)), -float("inf"))
        line = (split * KV_HEADS + kv_head) * GROUP + group
        tl.store(split_out_ptr + line[:, None] * HEAD_DIM + full[None, :], acc, mask=in_group[:, None])
        tl.store(split_lse_ptr + line, lse, mask=in_group)


@triton.jit
def _merge_splits_kernel(
    split_out_ptr: tl.tensor,  # [MAX_SPLITS, HEADS, HEAD_DIM]
    split_lse_ptr: tl.tensor,  # [MAX_SPLITS, HEADS]
    seq_len_ptr: tl.tensor,  # int32[1]
    out_ptr: tl.tensor,  # [HEADS × HEAD_DIM]
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program h: merge the splits of head h, each weighted by its share of the sum of all weights."""
    head = tl.program_id(0)
    splits = tl.arange(0, MAX_SPLITS)
    full = tl.arange(0, HEAD_DIM)
    _, _, num_splits = _split_range(tl.load(seq_len_ptr) - 1, WINDOW, MAX_SPLITS, BLOCK_N)
    exists = splits < num_splits
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = splits * HEADS + head
    lse = tl.load(split_lse_ptr + index, mask=exists, other=-float("inf"))
    values = tl.load(split_out_ptr + index[:, None] * HEAD_DIM + full[None, :], mask=exists[:, None], other=0.0)
    shares = tl.exp(lse - tl.max(lse, axis=0))
    merged = tl.sum(values * shares[:, None], axis=0) / tl.sum(shares, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + full, merged)


@triton.jit
def _split_range(position, WINDOW: tl.constexpr, MAX_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Split the keys that a token sees, in whole blocks; return the first key, the size of a split and their number."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N
    split_size = tl.cdiv(tl.cdiv(position + 1 - begin, BLOCK_N), MAX_SPLITS) * BLOCK_N
    return begin, split_size, tl.cdiv(position + 1 - begin, split_size)


@triton.jit
def _load_block(
    k_cache_ptr, v_cache_ptr, page_row, start, stop, position, kv_head,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Load both halves of BLOCK_N keys, transposed, their values, and which are before ``stop`` and in the window."""
    half = tl.arange(0, HEAD_DIM // 2)
    full = tl.arange(0, HEAD_DIM)
    keys = start + tl.arange(0, BLOCK_N)
    visible = keys < stop
    if WINDOW > 0:
        visible = visible & (keys > position - WINDOW)
    page = tl.load(page_row + keys // PAGE_SIZE, mask=visible, other=0).to(tl.int64)
    offset = ((page * PAGE_SIZE + keys % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    k1 = tl.load(k_cache_ptr + offset[None, :] + half[:, None], mask=visible[None, :], other=0.0)
    k2 = tl.load(k_cache_ptr + offset[None, :] + HEAD_DIM // 2 + half[:, None], mask=visible[None, :], other=0.0)
    v = tl.load(v_cache_ptr + offset[:, None] + full[None, :], mask=visible[:, None], other=0.0)
    return k1, k2, v, visible


@triton.jit
def _norm_and_rotate(first, second, first_norm, second_norm, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm over both halves of the last dimension, then the rotation of each pair (first[i], second[i])."""
    if NORM:
        squares = tl.sum(first * first, axis=-1, keep_dims=True) + tl.sum(second * second, axis=-1, keep_dims=True)
        scale = tl.rsqrt(squares / SIZE + eps)
        first, second = first * scale * first_norm, second * scale * second_norm
    return first * cos - second * sin, second * cos + first * sin
