"""The attention backend made of our Triton kernels, and its simpler sibling with a fixed number of splits."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
import triton
import triton.language as tl

from minisgl.attention.torch_backend import PagedAttention
from minisgl.attention.triton import TRITON_DTYPES
from minisgl.attention.triton.decode import key_range, keys_per_tile, paged_decode_attention
from minisgl.attention.triton.merge import PrefixParts
from minisgl.attention.triton.prefill import QueryTiles, paged_prefill_attention, query_tiles
from minisgl.attention.triton.tiles import LOG2_E, LOWEST, attend_keys
from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache

# Tiles that may be partly empty in a padded step: one for each row, and rows have so many tokens on average.
_FEW_TILES = 16
_TOKENS_A_ROW = 16

_INTERPRETED_SMS = 2  # multiprocessors that the interpreter pretends to have; it runs one program after another


class TritonAttention(PagedAttention):
    """Decode rows by `decode_kernel`, which needs no plan, and prefill rows by `prefill_kernel`, which needs tiles.

    In a captured step with prefill rows both kernels are launched for as many rows and tiles as the inputs can hold:
    rows without keys and tiles of a row without tokens do nothing.
    """

    capturable = True
    captures_prefill = True
    features = frozenset({"sinks"})

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
        self._num_decode: int  # rows that the decode kernel is launched for
        self._decode_inputs: DeviceBatch  # with the lengths of these rows
        self._query_tiles: dict[int, QueryTiles] = {}  # of this step, by number of query heads a KV head
        self._groups: set[int] = set()  # such numbers, as layers have had them
        self._like_q = torch.empty((0, 1, kv_cache.k.shape[-1]), dtype=dtype, device=device)
        # Of padded inputs, by their numbers of tokens and rows: memory that keeps its address.
        self._padded_tiles: dict[tuple[int, int, int, int], QueryTiles] = {}
        self._padded_lens: dict[tuple[int, int], torch.Tensor] = {}

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        self._batch, self.inputs = batch, inputs
        self._query_tiles.clear()
        self._num_decode, self._decode_inputs = batch.num_decode, inputs
        if not inputs.padded:
            return None
        if batch.num_decode > 0:
            self._num_decode = min(len(inputs.slots) - 1, len(inputs.positions))
            self._decode_inputs = replace(inputs, seq_lens=self._decode_lens(batch, inputs))
        return self._num_decode, tuple(self._tiles(group)[1] for group in sorted(self._groups))

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_empty(q.shape)
        num_decode = self._num_decode
        if num_decode > 0:
            self._decode(q[:num_decode], out[:num_decode], spec)
        if self._batch.num_decode < self._batch.num_rows:
            group = spec.num_heads // spec.num_kv_heads
            self._groups.add(group)
            # After the decode rows, because in a padded step the tokens behind those are prefill tokens.
            paged_prefill_attention(q, out, *self._layer(spec), self.inputs, spec, self._tiles(group)[0])
        return out

    def _tiles(self, group: int) -> tuple[QueryTiles, Hashable]:
        """The tiles of this step's prefill rows, and a key of the launch that attends to them."""
        if group not in self._query_tiles:
            tiles = query_tiles(self._batch, group, self._like_q)
            self._query_tiles[group] = self._pad(tiles, group) if self.inputs.padded else tiles
        tiles = self._query_tiles[group]
        return tiles, (len(tiles.rows), tiles.block_m)

    def _pad(self, tiles: QueryTiles, group: int) -> QueryTiles:
        """The tiles in memory of the padded inputs, if there are not more than it has room for."""
        num_tokens, num_rows, count = len(self.inputs.positions), len(self.inputs.slots), len(tiles.rows)
        begun = num_rows - 1 if self.inputs.verifies else max(_FEW_TILES, num_tokens // _TOKENS_A_ROW)
        room = -(-num_tokens * group // tiles.block_m) + begun  # a row begins a tile of its own
        if count > room:
            return tiles
        key = room, num_rows, group, tiles.block_m
        if key not in self._padded_tiles:
            rows, begins = (torch.zeros(room, dtype=torch.int32, device=tiles.rows.device) for _ in range(2))
            self._padded_tiles[key] = replace(tiles, rows=rows, begins=begins)
        padded = self._padded_tiles[key]
        padded.rows[:count].copy_(tiles.rows)
        padded.rows[count:].fill_(num_rows - 1)
        padded.begins[:count].copy_(tiles.begins)
        padded.begins[count:].fill_(0)
        return padded

    def _decode_lens(self, batch: Batch, inputs: DeviceBatch) -> torch.Tensor:
        """Keys of each row, int32[R], with 0 for rows that are not decode rows."""
        sizes = len(inputs.positions), len(inputs.slots)
        if sizes not in self._padded_lens:
            self._padded_lens[sizes] = torch.empty_like(inputs.seq_lens)
        lens = self._padded_lens[sizes]
        lens[: batch.num_decode].copy_(inputs.seq_lens[: batch.num_decode])
        lens[batch.num_decode :].fill_(0)
        return lens

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        paged_decode_attention(q, out, *self._layer(spec), self._decode_inputs, spec, self._num_sms, prefix)

    def _layer(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_cache.layer(spec.layer_id)


@triton.jit(do_not_specialize_on_alignment=["seq_lens_ptr", "slots_ptr"])
def fixed_split_kernel(
    q_ptr,  # [R, KV_HEADS × GROUP, HEAD_DIM], any strides but the last
    k_cache_ptr,  # a layer of the cache, [pages, PAGE_SIZE, KV_HEADS, HEAD_DIM], as v_cache
    v_cache_ptr,
    out_ptr,  # [R, num_splits, KV_HEADS × GROUP, HEAD_DIM] attention over each split
    out_lse_ptr,  # float32[R, num_splits, KV_HEADS × GROUP], log2; LOWEST for a split without keys
    seq_lens_ptr,  # int32[R]
    slots_ptr,  # int32[R]
    page_table_ptr,  # int32[slots, table_width]
    scale,  # × log2(e)
    token_stride,
    head_stride,
    table_width,
    HEADS: tl.constexpr,  # 1 or GROUP
    WINDOW: tl.constexpr,  # 0: no sliding window
    PAGE_SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,  # HEADS or more
    BLOCK_N: tl.constexpr,  # keys a tile
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Program (h, r, s): the h-th HEADS query heads, over the s-th split of row r's keys."""
    row = tl.program_id(1)
    split = tl.program_id(2)
    first, end = key_range(seq_lens_ptr, seq_lens_ptr, row, True, False, WINDOW)
    keys_per_split = tl.cdiv(tl.cdiv(end - first, BLOCK_N), tl.num_programs(2)) * BLOCK_N
    begin = first + split * keys_per_split
    stop = tl.minimum(begin + keys_per_split, end)

    head_index = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    heads = tl.program_id(0) * HEADS + head_index
    mask = (head_index < HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    q = tl.load(q_ptr + row * token_stride + heads[:, None] * head_stride + dims[None, :], mask, other=0.0)
    page_row = page_table_ptr + tl.load(slots_ptr + row) * table_width
    kv_head = tl.program_id(0) * HEADS // GROUP
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], LOWEST, tl.float32)
    visible_end = tl.full([1], 0, tl.int32) + stop
    acc, row_sum, row_max = attend_keys(
        q, k_cache_ptr, v_cache_ptr, page_row, kv_head, begin, stop, visible_end,
        scale, acc, row_sum, row_max, True, 0, PAGE_SIZE, KV_HEADS, HEAD_DIM, BLOCK_N, BLOCK_D,
    )  # fmt: skip

    line = (row * tl.num_programs(2) + split) * (KV_HEADS * GROUP) + heads
    row_sum = tl.where(row_sum > 0, row_sum, 1.0)
    result = acc / row_sum[:, None]
    tl.store(out_ptr + line[:, None] * HEAD_DIM + dims[None, :], result.to(out_ptr.dtype.element_ty), mask)
    tl.store(out_lse_ptr + line, row_max + tl.log2(row_sum), head_index < HEADS)


@triton.jit
def merge_splits_kernel(
    out_ptr,  # [R, NUM_HEADS, HEAD_DIM], written
    split_out_ptr,  # float32[R, NUM_SPLITS, NUM_HEADS, HEAD_DIM]
    split_lse_ptr,  # float32[R, NUM_SPLITS, NUM_HEADS]
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_S: tl.constexpr,  # NUM_SPLITS or more
    BLOCK_D: tl.constexpr,  # HEAD_DIM or more
):
    """Program (h, r): merge the splits of row r in query head h."""
    line = tl.program_id(1) * NUM_SPLITS * NUM_HEADS + tl.program_id(0)
    splits = tl.arange(0, BLOCK_S)
    dims = tl.arange(0, BLOCK_D)
    lines = line + splits * NUM_HEADS
    mask = (splits < NUM_SPLITS)[:, None] & (dims < HEAD_DIM)[None, :]
    lse = tl.load(split_lse_ptr + lines, splits < NUM_SPLITS, other=LOWEST)
    results = tl.load(split_out_ptr + lines[:, None] * HEAD_DIM + dims[None, :], mask, other=0.0)
    weights = tl.exp2(lse - tl.max(lse, 0))
    merged = tl.sum(results * weights[:, None], 0) / tl.sum(weights, 0)
    pointers = out_ptr + (tl.program_id(1) * NUM_HEADS + tl.program_id(0)) * HEAD_DIM + dims
    tl.store(pointers, merged.to(out_ptr.dtype.element_ty), dims < HEAD_DIM)


class FixedSplitAttention(TritonAttention):
    """FlashDecoding with fixed splits a row, for comparison; ``grouped``: one program for a KV head's query heads."""

    features = frozenset()  # the comparison is about plain attention

    def __init__(self, kv_cache: KVCache, grouped: bool = True, num_splits: int = 1) -> None:
        super().__init__(kv_cache)
        self.grouped = grouped
        self.num_splits = num_splits

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        k_cache, v_cache = self._layer(spec)
        page_table = self.inputs.table_of(spec.sliding_window)
        num_rows, num_heads, head_dim = out.shape
        page_size, kv_heads = k_cache.shape[1:3]
        group = num_heads // kv_heads
        heads = group if self.grouped else 1
        block_d = max(16, triton.next_power_of_2(head_dim))
        lines = (num_rows, self.num_splits, num_heads)
        split_lse = torch.empty(lines, dtype=torch.float32, device=out.device)
        split_out = (
            out if self.num_splits == 1 else torch.empty((*lines, head_dim), dtype=torch.float32, device=out.device)
        )
        fixed_split_kernel[(num_heads // heads, num_rows, self.num_splits)](
            q,
            k_cache,
            v_cache,
            split_out,
            split_lse,
            self.inputs.seq_lens,
            self.inputs.slots,
            page_table,
            spec.scale * LOG2_E,
            q.stride(0),
            q.stride(1),
            page_table.stride(0),
            HEADS=heads,
            WINDOW=spec.sliding_window or 0,
            PAGE_SIZE=page_size,
            GROUP=group,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_M=max(16, triton.next_power_of_2(heads)),
            BLOCK_N=keys_per_tile(q, block_d),
            BLOCK_D=block_d,
            num_warps=4,
            num_stages=3,
        )
        if self.num_splits > 1:
            block_s = triton.next_power_of_2(self.num_splits)
            merge_splits_kernel[(num_heads, num_rows)](
                out, split_out, split_lse, num_heads, head_dim, self.num_splits, block_s, block_d, num_warps=4
            )
