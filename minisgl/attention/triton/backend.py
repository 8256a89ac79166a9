"""The backend made of our own Triton kernels."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton
import triton.language as tl

from minisgl.attention.torch_backend import PagedAttention
from minisgl.attention.triton import TRITON_DTYPES
from minisgl.attention.triton.decode import decode, key_range
from minisgl.attention.triton.merge import PrefixParts
from minisgl.attention.triton.prefill import QueryTiles, prefill, query_tiles
from minisgl.attention.triton.tiles import LOG2_E, LOWEST, attend_keys
from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache

_INTERPRETED_SMS = 2
"""Multiprocessors that the interpreter pretends to have; it runs one program after another."""


class TritonAttention(PagedAttention):
    """Decode rows by `decode_kernel`, prefill rows by `prefill_kernel`.

    Decode steps need no plan: their kernel reads lengths and pages from the step's tensors.

    Args:
        kv_cache: where keys and values live.

    Raises:
        ConfigError: the cache is not on a CUDA device, and Triton's interpreter is off.
    """

    capturable = True

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        device, dtype = kv_cache.k.device, kv_cache.dtype
        if dtype not in TRITON_DTYPES:
            raise ConfigError(
                "prefill_attention, decode_attention: the Triton kernels compute float16, bfloat16 and float32, the "
                f"model is {str(dtype).removeprefix('torch.')}; choose 'torch'"
            )
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        elif triton.knobs.runtime.interpret:
            self._num_sms = _INTERPRETED_SMS
        else:
            raise ConfigError(
                "prefill_attention, decode_attention: the Triton kernels need a CUDA device, the KV cache is on "
                f"{device.type!r}; choose 'torch', or set TRITON_INTERPRET=1 before Triton is imported to run them "
                "slowly on the CPU"
            )
        self._batch: Batch
        self._query_tiles: dict[int, QueryTiles] = {}

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Start a step. Prefill rows are cut up by the first layer, which knows how many query heads there are."""
        self._batch, self.inputs = batch, inputs
        self._query_tiles.clear()
        return None

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_empty(q.shape)
        num_decode = self._batch.num_decode
        if num_decode > 0:
            self._decode(q[:num_decode], out[:num_decode], spec)
        if num_decode < self._batch.num_rows:
            group = spec.num_heads // spec.num_kv_heads
            if group not in self._query_tiles:
                self._query_tiles[group] = query_tiles(self._batch, group, q)
            prefill(q, out, *self._layer(spec), self.inputs, spec, self._query_tiles[group])
        return out

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        decode(q, out, *self._layer(spec), self.inputs, spec, self._num_sms, prefix)

    def _layer(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_cache.k[spec.layer_id], self.kv_cache.v[spec.layer_id]


_TILE_BYTES = 16384
"""Of a tile of keys; the values are as many again."""


@triton.jit(do_not_specialize_on_alignment=["seq_lens", "slots"])
def rows_kernel(
    queries,
    keys,
    values,
    out,
    out_lse,
    seq_lens,
    slots,
    page_table,
    scale,
    token_stride,
    head_stride,
    table_width,
    HEADS: tl.constexpr,
    WINDOW: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, r, p): HEADS query heads from the h-th HEADS on, over the p-th piece of row r's keys.

    Args:
        queries: [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last.
        keys, values: a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM].
        out: [R, pieces, KV_HEADS × GROUP, HEAD_DIM] attention over each piece.
        out_lse: float32[R, pieces, KV_HEADS × GROUP] log2 of its sum of weights; LOWEST for a piece without keys.
        seq_lens, slots: int32[R]. page_table: int32[slots, table_width].
        scale: times log2(e).
        HEADS: 1 or GROUP. WINDOW: 0 is none. BLOCK_M, BLOCK_D: HEADS and HEAD_DIM or more. BLOCK_N: keys a tile.
    """
    row = tl.program_id(1)
    piece = tl.program_id(2)
    first, end = key_range(seq_lens, seq_lens, row, True, False, WINDOW)
    keys_a_piece = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = first + piece * keys_a_piece
    stop = tl.minimum(begin + keys_a_piece, end)

    members = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = tl.program_id(0) * HEADS + members
    used = (members < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(queries + row * token_stride + heads[:, None] * head_stride + dims[None, :], used, other=0.0)
    page_row = page_table + tl.load(slots + row) * table_width
    kv_head = tl.program_id(0) * HEADS // GROUP
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    peak = tl.full([BLOCK_M], LOWEST, tl.float32)
    seen = tl.full([1], 0, tl.int32) + stop
    acc, total, peak = attend_keys(
        q, keys, values, page_row, kv_head, begin, stop, seen, scale, acc, total, peak,
        True, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    line = (row * tl.num_programs(2) + piece) * (KV_HEADS * GROUP) + heads
    total = tl.where(total > 0, total, 1.0)
    result = acc / total[:, None]
    tl.store(out + line[:, None] * HEAD_DIM + dims[None, :], result.to(out.dtype.element_ty), used)
    tl.store(out_lse + line, peak + tl.log2(total), members < HEADS)


@triton.jit
def merge_pieces_kernel(
    out,
    piece_out,
    piece_lse,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PIECES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program (h, r): merge the pieces of row r in query head h.

    Args:
        out: [R, NUM_HEADS, HEAD_DIM] written.
        piece_out, piece_lse: float32, ``out`` and ``out_lse`` of `rows_kernel`.
        BLOCK_P, BLOCK_D: PIECES and HEAD_DIM or more.
    """
    line = tl.program_id(1) * PIECES * NUM_HEADS + tl.program_id(0)
    pieces = tl.arange(0, BLOCK_P)
    dims = tl.arange(0, BLOCK_D)
    lines = line + pieces * NUM_HEADS
    used = (pieces < PIECES)[:, None] & (dims < HEAD_DIM)[None, :]
    lse = tl.load(piece_lse + lines, pieces < PIECES, other=LOWEST)
    results = tl.load(piece_out + lines[:, None] * HEAD_DIM + dims[None, :], used, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 0))
    merged = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    pointers = out + (tl.program_id(1) * NUM_HEADS + tl.program_id(0)) * HEAD_DIM + dims
    tl.store(pointers, merged.to(out.dtype.element_ty), dims < HEAD_DIM)


class RowAttention(TritonAttention):
    """`TritonAttention` whose decode rows are computed by `rows_kernel`.

    Args:
        kv_cache: where keys and values live.
        grouped: whether the query heads that share a KV head share a program.
        pieces: into how many each row's keys are cut.
    """

    def __init__(self, kv_cache: KVCache, grouped: bool = True, pieces: int = 1) -> None:
        super().__init__(kv_cache)
        self.grouped = grouped
        self.pieces = pieces

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        keys, values = self._layer(spec)
        num_rows, num_heads, head_dim = out.shape
        page_size, kv_heads = keys.shape[1:3]
        group = num_heads // kv_heads
        heads = group if self.grouped else 1
        block_d = max(16, triton.next_power_of_2(head_dim))
        lines = (num_rows, self.pieces, num_heads)
        lse = torch.empty(lines, dtype=torch.float32, device=out.device)
        parts = out if self.pieces == 1 else torch.empty((*lines, head_dim), dtype=torch.float32, device=out.device)
        rows_kernel[(num_heads // heads, num_rows, self.pieces)](
            q,
            keys,
            values,
            parts,
            lse,
            self.inputs.seq_lens,
            self.inputs.slots,
            self.inputs.page_table,
            spec.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            self.inputs.page_table.stride(0),
            HEADS=heads,
            WINDOW=spec.sliding_window or 0,
            PAGE_SIZE=page_size,
            GROUP=group,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_M=max(16, triton.next_power_of_2(heads)),
            BLOCK_N=min(128, max(16, _TILE_BYTES // (block_d * q.element_size()))),
            BLOCK_D=block_d,
            num_warps=4,
            num_stages=3,
        )
        if self.pieces > 1:
            block_p = triton.next_power_of_2(self.pieces)
            merge_pieces_kernel[(num_heads, num_rows)](
                out, parts, lse, num_heads, head_dim, self.pieces, block_p, block_d, num_warps=4
            )
