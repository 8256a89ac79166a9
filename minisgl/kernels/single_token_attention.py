"""All of attention between two projections, for a single token, in two kernels: QK-norm, rotary embedding, KV store and
split-KV attention (FlashDecoding, Dao et al. 2023); and the merge of the parts.

Its twin is `minisgl.layers.Attention` without the projections, over a `PagedAttention`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import from_kv_dtype, pdl_launch_args, tile_range, to_kv_dtype, wide

SPLITS = 16
"""Most programs that share one KV head's keys."""
_BLOCK = 64
"""Keys that a program takes at a time."""


@triton.jit
def _norm_and_rotate(first, second, first_norm, second_norm, cos, sin, eps, SIZE: tl.constexpr, NORM: tl.constexpr):
    """RMSNorm over both halves of the last dimension, then the rotation of each pair (first[i], second[i])."""
    if NORM:
        squares = tl.sum(first * first, axis=-1, keep_dims=True) + tl.sum(second * second, axis=-1, keep_dims=True)
        scale = tl.rsqrt(squares / SIZE + eps)
        first, second = first * scale * first_norm, second * scale * second_norm
    return first * cos - second * sin, second * cos + first * sin


@triton.jit
def _cut(position, WINDOW: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr):
    """The keys that a token sees, cut into at most SPLITS parts of whole blocks: their begin, size and number."""
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(position + 1 - WINDOW, 0) // BLOCK * BLOCK
    part_size = tl.cdiv(tl.cdiv(position + 1 - begin, BLOCK), SPLITS) * BLOCK
    return begin, part_size, tl.cdiv(position + 1 - begin, part_size)


@triton.jit
def _load_block(
    k_cache_ptr, v_cache_ptr, page_row, start, stop, position, kv_head,
    WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Both halves of BLOCK keys, transposed, their values, and which of them are before ``stop`` and in the window."""
    half = tl.arange(0, HEAD_DIM // 2)
    full = tl.arange(0, HEAD_DIM)
    keys = start + tl.arange(0, BLOCK)
    visible = keys < stop
    if WINDOW > 0:
        visible = visible & (keys > position - WINDOW)
    page = tl.load(page_row + keys // PAGE_SIZE, mask=visible, other=0).to(tl.int64)
    place = ((page * PAGE_SIZE + keys % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
    k1 = tl.load(k_cache_ptr + place[None, :] + half[:, None], mask=visible[None, :], other=0.0)
    k2 = tl.load(k_cache_ptr + place[None, :] + HEAD_DIM // 2 + half[:, None], mask=visible[None, :], other=0.0)
    v = tl.load(v_cache_ptr + place[:, None] + full[None, :], mask=visible[:, None], other=0.0)
    return k1, k2, v, visible


@triton.jit
def _attention_kernel(
    qkv_ptr: tl.tensor,
    q_norm_ptr: tl.tensor,
    k_norm_ptr: tl.tensor,
    rotary_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    k_cache_ptr: tl.tensor,
    v_cache_ptr: tl.tensor,
    part_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    table_width: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    WINDOW: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (h, s): the query heads of KV head h over the s-th part of its keys.

    The program whose part ends the sequence also normalises
    and rotates the token's own key, and stores it. Heads are kept in two halves, because that is how rotary embedding
    pairs their elements; a dot product is the sum of those of the halves.

    qkv: [(GROUP + 2) × KV_HEADS × HEAD_DIM]. rotary: float32[positions, HEAD_DIM], cos in the first half. slot, length:
    int32[1], the length with this token. caches: [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], of any dtype. part: [SPLITS,
    heads, HEAD_DIM] and part_lse: [SPLITS, heads], attention over each part and the logarithm of its sum of weights.
    """
    kv_head, split = tl.program_id(0), tl.program_id(1)
    HALF: tl.constexpr = HEAD_DIM // 2
    half = tl.arange(0, HALF)
    full = tl.arange(0, HEAD_DIM)
    group = tl.arange(0, GROUP_BLOCK)
    position = tl.load(length_ptr) - 1
    page_row = page_table_ptr + tl.load(slot_ptr).to(tl.int64) * table_width

    begin, part_size, num_parts = _cut(position, WINDOW, SPLITS, BLOCK)
    first = begin + split * part_size
    stop = tl.minimum(first + part_size, position)  # earlier tokens only

    # What earlier steps have left can be fetched before this step's query is there.
    rotary = rotary_ptr + position.to(tl.int64) * HEAD_DIM + half
    cos, sin = tl.load(rotary).to(WIDE), tl.load(rotary + HALF).to(WIDE)
    q_norm1, q_norm2, k_norm1, k_norm2 = cos, cos, cos, cos
    if NORM:
        q_norm1, q_norm2 = tl.load(q_norm_ptr + half).to(WIDE), tl.load(q_norm_ptr + HALF + half).to(WIDE)
        k_norm1, k_norm2 = tl.load(k_norm_ptr + half).to(WIDE), tl.load(k_norm_ptr + HALF + half).to(WIDE)
    k1, k2, v, visible = _load_block(
        k_cache_ptr, v_cache_ptr, page_row, first, stop, position, kv_head,
        WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK,
    )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    if split < num_parts:
        q_ptr = qkv_ptr + (kv_head * GROUP + group[:, None]) * HEAD_DIM + half[None, :]
        k_ptr = qkv_ptr + (KV_HEADS * GROUP + kv_head) * HEAD_DIM
        in_group = group < GROUP
        q1 = tl.load(q_ptr, mask=in_group[:, None], other=0.0).to(WIDE)
        q2 = tl.load(q_ptr + HALF, mask=in_group[:, None], other=0.0).to(WIDE)
        own1, own2 = tl.load(k_ptr + half).to(WIDE), tl.load(k_ptr + HALF + half).to(WIDE)
        own_v = tl.load(k_ptr + KV_HEADS * HEAD_DIM + full)
        q1, q2 = _norm_and_rotate(
            q1, q2, q_norm1[None, :], q_norm2[None, :], cos[None, :], sin[None, :], eps, HEAD_DIM, NORM
        )

        top = tl.full((GROUP_BLOCK,), -float("inf"), dtype=WIDE)
        total = tl.zeros((GROUP_BLOCK,), dtype=WIDE)
        acc = tl.zeros((GROUP_BLOCK, HEAD_DIM), dtype=WIDE)
        narrow = qkv_ptr.dtype.element_ty
        narrow_q1, narrow_q2 = q1.to(narrow), q2.to(narrow)
        for start in tile_range(first, stop, BLOCK):
            scores = tl.dot(narrow_q1, from_kv_dtype(k1, narrow), input_precision="ieee", out_dtype=tl.float32).to(WIDE)
            upper = tl.dot(narrow_q2, from_kv_dtype(k2, narrow), input_precision="ieee", out_dtype=tl.float32)
            scores += upper.to(WIDE)
            scores = tl.where(visible[None, :], scores * scale, -float("inf"))
            new_top = tl.maximum(top, tl.max(scores, axis=1))
            # A block may be hidden as a whole by the window; −inf minus −inf is no number.
            base = tl.where(new_top == -float("inf"), 0.0, new_top)
            weights = tl.exp(scores - base[:, None])
            shrink = tl.exp(top - base)
            total = total * shrink + tl.sum(weights, axis=1)
            block_v = from_kv_dtype(v, narrow)
            product = tl.dot(weights.to(narrow), block_v, input_precision="ieee", out_dtype=tl.float32)
            acc = acc * shrink[:, None] + product.to(WIDE)
            top = new_top
            k1, k2, v, visible = _load_block(
                k_cache_ptr, v_cache_ptr, page_row, start + BLOCK, stop, position, kv_head,
                WINDOW, KV_HEADS, HEAD_DIM, PAGE_SIZE, BLOCK,
            )  # fmt: skip

        if split == num_parts - 1:
            own1, own2 = _norm_and_rotate(own1, own2, k_norm1, k_norm2, cos, sin, eps, HEAD_DIM, NORM)
            stored1, stored2 = to_kv_dtype(own1, k_cache_ptr), to_kv_dtype(own2, k_cache_ptr)
            stored_v = to_kv_dtype(own_v, v_cache_ptr)
            page = tl.load(page_row + position // PAGE_SIZE).to(tl.int64)
            place = ((page * PAGE_SIZE + position % PAGE_SIZE) * KV_HEADS + kv_head) * HEAD_DIM
            tl.store(k_cache_ptr + place + half, stored1)
            tl.store(k_cache_ptr + place + HALF + half, stored2)
            tl.store(v_cache_ptr + place + full, stored_v)
            own1, own2 = from_kv_dtype(stored1, WIDE), from_kv_dtype(stored2, WIDE)  # what later steps will see
            score = (tl.sum(q1 * own1[None, :], axis=1) + tl.sum(q2 * own2[None, :], axis=1)) * scale
            new_top = tl.maximum(top, score)
            shrink, weight = tl.exp(top - new_top), tl.exp(score - new_top)
            total = total * shrink + weight
            acc = acc * shrink[:, None] + weight[:, None] * from_kv_dtype(stored_v, WIDE)[None, :]
            top = new_top

        seen = total > 0.0
        acc = acc / tl.where(seen, total, 1.0)[:, None]
        lse = tl.where(seen, top + tl.log(tl.where(seen, total, 1.0)), -float("inf"))
        part = (split * KV_HEADS + kv_head) * GROUP + group
        tl.store(part_ptr + part[:, None] * HEAD_DIM + full[None, :], acc, mask=in_group[:, None])
        tl.store(part_lse_ptr + part, lse, mask=in_group)


@triton.jit
def _merge_kernel(
    part_ptr: tl.tensor,
    part_lse_ptr: tl.tensor,
    length_ptr: tl.tensor,
    out_ptr: tl.tensor,
    WINDOW: tl.constexpr,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program h: the parts of head h as one, each weighted by its share of the sum of all weights.

    part: [SPLITS, HEADS, HEAD_DIM]. part_lse: [SPLITS, HEADS]. length: int32[1]. out: [HEADS × HEAD_DIM].
    """
    head = tl.program_id(0)
    parts = tl.arange(0, SPLITS)
    full = tl.arange(0, HEAD_DIM)
    _, _, num_parts = _cut(tl.load(length_ptr) - 1, WINDOW, SPLITS, BLOCK)
    there = parts < num_parts
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    index = parts * HEADS + head
    lse = tl.load(part_lse_ptr + index, mask=there, other=-float("inf"))
    values = tl.load(part_ptr + index[:, None] * HEAD_DIM + full[None, :], mask=there[:, None], other=0.0)
    shares = tl.exp(lse - tl.max(lse, axis=0))
    merged = tl.sum(values * shares[:, None], axis=0) / tl.sum(shares, axis=0)
    tl.store(out_ptr + head * HEAD_DIM + full, merged)


class SingleTokenAttention:
    """The kernels and their scratch memory, for all layers of a model.

    Args:
        num_heads, num_kv_heads, head_dim: of the model; head_dim is a power of two.
        dtype, device: of the weights.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.kv_heads, self.group, self.head_dim = num_kv_heads, num_heads // num_kv_heads, head_dim
        precise = torch.promote_types(dtype, torch.float32)
        self._parts = torch.empty((SPLITS, num_heads, head_dim), dtype=precise, device=device)
        self._part_lse = torch.empty((SPLITS, num_heads), dtype=precise, device=device)

    def __call__(
        self,
        qkv: torch.Tensor,
        norms: tuple[torch.Tensor, torch.Tensor] | None,
        eps: float,
        rotary: torch.Tensor,
        slot: torch.Tensor,
        length: torch.Tensor,
        page_table: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scale: float,
        window: int | None,
        out: torch.Tensor,
    ) -> None:
        """Attend and store one token of one layer.

        Args:
            qkv: [(num_heads + 2 × num_kv_heads) × head_dim] packed projection.
            norms: weights of QK-norm, [head_dim] each; None without.
            eps: of the norms.
            rotary: float32[positions, head_dim], see `Rotary.table`.
            slot, length: int32[1] row in the page table, and tokens with this one.
            page_table: int32[rows, pages].
            k_cache, v_cache: [pages, page_size, num_kv_heads, head_dim] of the layer.
            scale: factor on q·k.
            window: as in `AttentionSpec`.
            out: [num_heads × head_dim].
        """
        q_norm, k_norm = norms or (qkv, qkv)
        _attention_kernel[(self.kv_heads, SPLITS)](
            qkv,
            q_norm,
            k_norm,
            rotary,
            slot,
            length,
            page_table,
            k_cache,
            v_cache,
            self._parts,
            self._part_lse,
            page_table.stride(0),
            scale,
            eps,
            WINDOW=window or 0,
            KV_HEADS=self.kv_heads,
            GROUP=self.group,
            GROUP_BLOCK=max(16, triton.next_power_of_2(self.group)),
            HEAD_DIM=self.head_dim,
            PAGE_SIZE=k_cache.shape[1],
            SPLITS=SPLITS,
            BLOCK=_BLOCK,
            NORM=norms is not None,
            WIDE=wide(qkv.dtype),
            num_warps=4,
            **pdl_launch_args(qkv.unsqueeze(0)),
        )
        _merge_kernel[(self.kv_heads * self.group,)](
            self._parts,
            self._part_lse,
            length,
            out,
            WINDOW=window or 0,
            HEADS=self.kv_heads * self.group,
            HEAD_DIM=self.head_dim,
            SPLITS=SPLITS,
            BLOCK=_BLOCK,
            num_warps=4,
            **pdl_launch_args(qkv.unsqueeze(0)),
        )
