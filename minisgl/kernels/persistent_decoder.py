"""All layers of a decoder for a single token in one kernel, whose programs stay from the first product to the last.

A layer is five instructions (`OPERATIONS`). Every program, one for each multiprocessor of the GPU, goes through the
same list: of each instruction it does its share, counts itself as arrived, and waits until all have arrived before it
reads what the others wrote. Weights depend on no instruction, so a program asks for its share before it waits. Known
as a megakernel (Hazy Research's for Llama-1B, 2025; Mirage's MPK, Cheng et al. 2025).

On an H200 it's slower than the six kernels of `minisgl.models.single_token` (see benchmarks/notes.md), so no engine
uses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, arrive, tile_range, wait
from minisgl.kernels.single_token_attention import attend_split, merge_splits, split_range
from minisgl.kernels.single_token_linear import store_outputs

OPERATIONS = ("qkv_proj", "attention", "o_proj", "gate_up_proj", "down_proj")
"""Instructions of a layer, in order. The first and the fourth begin with the norm, the third and the fifth end with the
residual addition; attention is QK-norm, rotation, KV store and attention itself, merged."""

ADDRESSES = (
    "qkv_weight", "qkv_bias", "o_weight", "gate_up_weight", "down_weight", "input_norm", "post_norm", "q_norm",
    "k_norm", "cos_sin", "k_cache", "v_cache",
)  # fmt: skip
"""Columns of the table of addresses, a row a layer: what a kernel reads that serves all layers."""

_HELD = 49152  # most elements of a weight that a program holds at once: 96 KB in bfloat16, 96 registers a thread
WIDEST = 4096
"""Elements of the longest vector that the kernel multiplies a weight with: every program holds all of it."""
_SPLIT_KEYS = 64  # keys that a program takes at a time
_WARPS = 8
# Weights are read in blocks of so many rows, a warp each, and so many columns: 8 a lane, 16 bytes in bfloat16. So no
# sum goes from warp to warp.
ROW_BLOCK = tl.constexpr(_WARPS)
CHUNK = tl.constexpr(256)


class PersistentShape(NamedTuple):
    """Sizes that the kernel is compiled for."""

    hidden: int
    intermediate: int
    kv_heads: int
    group: int  # query heads of a KV head
    head_dim: int
    page_size: int
    window: int  # 0 for none
    qk_norm: bool
    qkv_bias: bool

    @property
    def attended(self) -> int:
        """Width of attention's output."""
        return self.kv_heads * self.group * self.head_dim

    @property
    def qkv(self) -> int:
        """Width of the packed projection."""
        return (self.group + 2) * self.kv_heads * self.head_dim


class PersistentLayers:
    """The kernel, its scratch memory and its table of addresses.

    Args:
        shape: of every layer.
        addresses: [layers, len(ADDRESSES)] tensors; None where a layer has no such weight.
        programs: of the kernel, all of which must run at the same time: at most the GPU's multiprocessors, at least
            ``shape.kv_heads``.
        dtype: of weights and activations.
    """

    def __init__(
        self,
        shape: PersistentShape,
        addresses: list[list[torch.Tensor | None]],
        programs: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.shape, self.programs = shape, programs
        self.count = len(OPERATIONS) * len(addresses)
        """Instructions of all layers."""
        self._tensors = addresses  # kept alive: the kernel knows nothing but their addresses
        pointers = [[0 if each is None else each.data_ptr() for each in row] for row in addresses]
        self._table = torch.tensor(pointers, dtype=torch.int64, device=device)
        cache = addresses[0][ADDRESSES.index("k_cache")]
        assert cache is not None
        self._kv_element = cache.new_empty(1)  # only its dtype is read
        self.stream = torch.empty(shape.hidden, dtype=dtype, device=device)
        """Residual stream, [hidden]: before the first instruction, and after the last."""
        self.qkv = self.stream.new_empty(shape.qkv)
        self.attended = self.stream.new_empty(shape.attended)
        self.activated = self.stream.new_empty(shape.intermediate)
        self.splits = max(1, min(16, programs // shape.kv_heads))
        precise = torch.promote_types(dtype, torch.float32)
        heads = shape.kv_heads * shape.group
        self._split_out = torch.empty((self.splits, heads, shape.head_dim), dtype=precise, device=device)
        self._split_lse = torch.empty((self.splits, heads), dtype=precise, device=device)
        self.arrivals = torch.zeros(2 + shape.kv_heads, dtype=torch.int32, device=device)
        """Counters: programs that have arrived, those that have ended, and splits done of each KV head."""
        self._blocks = {
            "QKV_HELD": self._held(shape.qkv, shape.hidden),
            "O_HELD": self._held(shape.hidden, shape.attended),
            "GATE_UP_HELD": self._held(shape.intermediate, shape.hidden, products=2),
            "DOWN_HELD": self._held(shape.hidden, shape.intermediate),
        }

    def _held(self, rows: int, width: int, products: int = 1) -> int:
        """Rows of a weight that a program holds at once: all of its share, or as many as there are registers for."""
        share = triton.cdiv(triton.cdiv(rows, self.programs), _WARPS)
        most = _HELD // (products * _WARPS * triton.cdiv(width, CHUNK.value) * CHUNK.value)
        return int(max(1, min(share, most))) * _WARPS

    def run(
        self,
        slot: torch.Tensor,
        seq_len: torch.Tensor,
        page_table: torch.Tensor,
        scale: float,
        eps: float,
        head_eps: float,
        begin: int = 0,
        end: int | None = None,
        times: torch.Tensor | None = None,
    ) -> None:
        """Carry out instructions ``begin`` to ``end`` (by default all), on `stream`, in one launch.

        Triton's interpreter cannot let one program wait for another, so there each instruction is a launch.

        Args:
            slot, seq_len: int32[1] row in the page table, and tokens with this one.
            page_table: int32[rows, pages].
            scale: of attention.
            eps, head_eps: of the norms of a layer, and of its heads.
            times: int64[instructions, programs, 3], written: nanoseconds at which a program began an instruction, had
                what it reads, and was done. None on a CPU.
        """
        end = self.count if end is None else end
        launches = [(step, step + 1) for step in range(begin, end)] if INTERPRETED.value else [(begin, end)]
        cooperative: dict[str, Any] = {"launch_cooperative_grid": True} if self.stream.is_cuda else {}
        shape = self.shape
        for first, last in launches:
            _instructions_kernel[(self.programs,)](
                self._table,
                self._kv_element,
                self.stream,
                self.qkv,
                self.attended,
                self.activated,
                self._split_out,
                self._split_lse,
                self.arrivals,
                slot,
                seq_len,
                page_table,
                self.arrivals if times is None else times,
                page_table.stride(0),
                scale,
                eps,
                head_eps,
                first,
                last,
                HIDDEN=shape.hidden,
                INTERMEDIATE=shape.intermediate,
                **self._blocks,
                KV_HEADS=shape.kv_heads,
                GROUP=shape.group,
                GROUP_BLOCK=max(16, triton.next_power_of_2(shape.group)),
                HEAD_DIM=shape.head_dim,
                PAGE_SIZE=shape.page_size,
                WINDOW=shape.window,
                QK_NORM=shape.qk_norm,
                QKV_BIAS=shape.qkv_bias,
                SPLITS=self.splits,
                SPLITS_BLOCK=triton.next_power_of_2(self.splits),
                SPLIT_KEYS=_SPLIT_KEYS,
                PROGRAMS=self.programs,
                FIELDS=len(ADDRESSES),
                TIMED=times is not None,
                num_warps=_WARPS,
                **cooperative,
            )


@triton.jit
def _instructions_kernel(
    table_ptr: tl.tensor,  # int64[layers, FIELDS] addresses, as `ADDRESSES` names them
    kv_ptr: tl.tensor,  # of the KV cache's dtype, never read
    stream_ptr: tl.tensor,  # [HIDDEN] residual stream, read and written
    qkv_ptr: tl.tensor,
    attended_ptr: tl.tensor,
    activated_ptr: tl.tensor,  # [INTERMEDIATE]
    split_out_ptr: tl.tensor,  # [SPLITS, heads, HEAD_DIM]
    split_lse_ptr: tl.tensor,  # [SPLITS, heads]
    arrivals_ptr: tl.tensor,  # int32[2 + KV_HEADS], `PersistentLayers.arrivals`; 0 before and after
    slot_ptr: tl.tensor,
    seq_len_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    times_ptr: tl.tensor,
    table_width: tl.tensor,
    scale: tl.tensor,
    eps: tl.tensor,
    head_eps: tl.tensor,
    begin: tl.tensor,
    end: tl.tensor,
    HIDDEN: tl.constexpr,
    INTERMEDIATE: tl.constexpr,
    QKV_HELD: tl.constexpr,
    O_HELD: tl.constexpr,
    GATE_UP_HELD: tl.constexpr,
    DOWN_HELD: tl.constexpr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    GROUP_BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    WINDOW: tl.constexpr,
    QK_NORM: tl.constexpr,
    QKV_BIAS: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    FIELDS: tl.constexpr,
    TIMED: tl.constexpr,
) -> None:
    """Program p: its share of instructions ``begin`` to ``end``; instruction i is the (i mod 5)-th of layer i div 5."""
    ATTENDED: tl.constexpr = KV_HEADS * GROUP * HEAD_DIM
    QKV: tl.constexpr = ATTENDED + 2 * KV_HEADS * HEAD_DIM
    DTYPE: tl.constexpr = split_out_ptr.dtype.element_ty
    for step in tile_range(begin, end, 1):
        operation = step % 5
        row = table_ptr + step // 5 * FIELDS
        needed = (step - begin) * PROGRAMS  # arrivals, once all are done with the instructions before this one
        moments = times_ptr + (step * PROGRAMS + tl.program_id(0)) * 3
        _note(moments, TIMED)
        if operation == 0:
            norm = _address(row + 5, stream_ptr)
            weight, bias = _address(row, stream_ptr), _address(row + 1, stream_ptr)
            _multiply(
                stream_ptr, norm, weight, bias, qkv_ptr, eps, arrivals_ptr, needed, moments,
                QKV, HIDDEN, QKV_HELD, PROGRAMS, True, QKV_BIAS, False, False, DTYPE, TIMED,
            )  # fmt: skip
        elif operation == 1:
            _attend(
                row, kv_ptr, stream_ptr, qkv_ptr, attended_ptr, split_out_ptr, split_lse_ptr, arrivals_ptr, slot_ptr,
                seq_len_ptr, page_table_ptr, table_width, scale, head_eps, needed, moments,
                KV_HEADS, GROUP, GROUP_BLOCK, HEAD_DIM, PAGE_SIZE, WINDOW, QK_NORM, SPLITS, SPLITS_BLOCK, SPLIT_KEYS,
                DTYPE, TIMED,
            )  # fmt: skip
        elif operation == 2:
            weight = _address(row + 2, stream_ptr)
            _multiply(
                attended_ptr, weight, weight, weight, stream_ptr, eps, arrivals_ptr, needed, moments,
                HIDDEN, ATTENDED, O_HELD, PROGRAMS, False, False, False, True, DTYPE, TIMED,
            )  # fmt: skip
        elif operation == 3:
            norm, weight = _address(row + 6, stream_ptr), _address(row + 3, stream_ptr)
            _multiply(
                stream_ptr, norm, weight, weight, activated_ptr, eps, arrivals_ptr, needed, moments,
                INTERMEDIATE, HIDDEN, GATE_UP_HELD, PROGRAMS, True, False, True, False, DTYPE, TIMED,
            )  # fmt: skip
        else:
            weight = _address(row + 4, stream_ptr)
            _multiply(
                activated_ptr, weight, weight, weight, stream_ptr, eps, arrivals_ptr, needed, moments,
                HIDDEN, INTERMEDIATE, DOWN_HELD, PROGRAMS, False, False, False, True, DTYPE, TIMED,
            )  # fmt: skip
        _note(moments + 2, TIMED)
        arrive(arrivals_ptr)
    # Whoever ends last leaves the counters as they were: all others are past their last wait.
    if tl.atomic_add(arrivals_ptr + 1, 1, sem="acq_rel", scope="gpu") == PROGRAMS - 1:
        tl.store(arrivals_ptr, 0)
        tl.store(arrivals_ptr + 1, 0)


@triton.jit
def _multiply(
    x_ptr, norm_ptr, weight_ptr, bias_ptr, out_ptr, eps, arrivals_ptr, arrivals, moments_ptr,
    N: tl.constexpr, K: tl.constexpr, HELD: tl.constexpr, PROGRAMS: tl.constexpr,
    NORM: tl.constexpr, BIAS: tl.constexpr, GATED: tl.constexpr, ADD: tl.constexpr, DTYPE: tl.constexpr,
    TIMED: tl.constexpr,
):  # fmt: skip
    """A program's share, neighbouring rows, of ``out = W x``, as `_linear_kernel` of `single_token_linear` says it.

    ADD: ``out`` is the residual stream, which the product is added to.
    """
    ROWS: tl.constexpr = (N + PROGRAMS - 1) // PROGRAMS
    first = tl.program_id(0) * ROWS
    stop = tl.minimum(first + ROWS, N)
    weights, ups = _load_rows(weight_ptr, first, stop, N, K, HELD, GATED)
    norms = weights
    if NORM:
        norms = _load_vector(norm_ptr, K, "")
    wait(arrivals_ptr, arrivals, "programs")
    _note(moments_ptr + 1, TIMED)
    # From the L2 cache (.cg): the own one may hold what was here before other programs wrote.
    xs = _load_vector(x_ptr, K, ".cg")
    scale = 1.0
    if NORM:
        squares = tl.zeros((ROW_BLOCK, CHUNK), dtype=DTYPE)
        for chunk in tl.static_range(0, len(xs)):
            squares += xs[chunk].to(DTYPE) * xs[chunk].to(DTYPE)
        scale = tl.rsqrt(tl.sum(squares, axis=1) / K + eps)
    for done in tl.static_range(0, ROWS, HELD):
        if done > 0:
            weights, ups = _load_rows(weight_ptr, first + done, stop, N, K, HELD, GATED)
        for block in tl.static_range(0, HELD // ROW_BLOCK):
            sums = tl.zeros((ROW_BLOCK, CHUNK), dtype=DTYPE)
            up_sums = sums
            for chunk in tl.static_range(0, len(xs)):
                x = xs[chunk].to(DTYPE)
                if NORM:
                    x *= norms[chunk].to(DTYPE)
                sums += weights[block * len(xs) + chunk].to(DTYPE) * x
                if GATED:
                    up_sums += ups[block * len(xs) + chunk].to(DTYPE) * x
            out, up = tl.sum(sums, axis=1) * scale, tl.sum(up_sums, axis=1) * scale
            rows = first + done + block * ROW_BLOCK + tl.arange(0, ROW_BLOCK)
            store_outputs(out, up, rows, stop, bias_ptr, out_ptr, out_ptr, N, BIAS, GATED, ADD, DTYPE)


@triton.jit
def _load_rows(
    weight_ptr, first, stop, N: tl.constexpr, K: tl.constexpr, HELD: tl.constexpr, GATED: tl.constexpr
):  # fmt: skip
    """Load HELD rows of a weight, as far as they are before ``stop``, and of their up projections, in pieces."""
    weights, ups = (), ()
    for block in tl.static_range(0, HELD, ROW_BLOCK):
        rows = (first + block + tl.arange(0, ROW_BLOCK))[:, None]
        for start in tl.static_range(0, K, CHUNK):
            columns = (start + tl.arange(0, CHUNK))[None, :]
            mask = (rows < stop) & (columns < K)
            weight = tl.load(weight_ptr + rows * K + columns, mask=mask, other=0.0)
            weights += (weight,)  # type: ignore[assignment]
            if GATED:
                up = tl.load(weight_ptr + N * K + rows * K + columns, mask=mask, other=0.0)
                ups += (up,)  # type: ignore[assignment]
    return weights, ups


@triton.jit
def _load_vector(x_ptr, K: tl.constexpr, CACHE: tl.constexpr):
    """Load [K] in pieces, once for each row of a block, so that it lies in the same threads as the weights do."""
    pieces = ()
    same = tl.arange(0, ROW_BLOCK)[:, None] * 0
    for start in tl.static_range(0, K, CHUNK):
        columns = same + start + tl.arange(0, CHUNK)[None, :]
        piece = tl.load(x_ptr + columns, mask=columns < K, other=0.0, cache_modifier=CACHE)
        pieces += (piece,)  # type: ignore[assignment]
    return pieces


@triton.jit
def _attend(
    row, kv_ptr, stream_ptr, qkv_ptr, attended_ptr, split_out_ptr, split_lse_ptr, arrivals_ptr, slot_ptr,
    seq_len_ptr, page_table_ptr, table_width, scale, eps, arrivals, moments_ptr,
    KV_HEADS: tl.constexpr, GROUP: tl.constexpr, GROUP_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
    PAGE_SIZE: tl.constexpr, WINDOW: tl.constexpr, QK_NORM: tl.constexpr, SPLITS: tl.constexpr,
    SPLITS_BLOCK: tl.constexpr, SPLIT_KEYS: tl.constexpr, DTYPE: tl.constexpr, TIMED: tl.constexpr,
):  # fmt: skip
    """Program h + KV_HEADS × s: KV head h over the s-th split of its keys. Who ends last of a head merges its splits.

    That costs one more read of what has just been written, where an instruction of its own would cost a wait of all
    programs for all.
    """
    kv_head, split = tl.program_id(0) % KV_HEADS, tl.program_id(0) // KV_HEADS
    _, _, num_splits = split_range(tl.load(seq_len_ptr) - 1, WINDOW, SPLITS, SPLIT_KEYS)
    if split < num_splits:
        attend_split(
            kv_head, split, qkv_ptr, _address(row + 7, stream_ptr), _address(row + 8, stream_ptr),
            tl.load(row + 9).to(tl.pointer_type(tl.float32)), slot_ptr, seq_len_ptr, page_table_ptr,
            _address(row + 10, kv_ptr), _address(row + 11, kv_ptr), split_out_ptr, split_lse_ptr, table_width, scale,
            eps, arrivals_ptr, arrivals, WINDOW, KV_HEADS, GROUP, GROUP_BLOCK, HEAD_DIM, PAGE_SIZE, SPLITS, SPLIT_KEYS,
            QK_NORM, DTYPE, "programs",
        )  # fmt: skip
        _note(moments_ptr + 1, TIMED)
        tl.debug_barrier()
        done_ptr = arrivals_ptr + 2 + kv_head
        if tl.atomic_add(done_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1:
            for member in range(GROUP):
                head = kv_head * GROUP + member
                merge_splits(
                    head, num_splits, split_out_ptr, split_lse_ptr, attended_ptr, KV_HEADS * GROUP, HEAD_DIM,
                    SPLITS_BLOCK,
                )  # fmt: skip
            tl.store(done_ptr, 0)


@triton.jit
def _address(entry_ptr, like_ptr):
    """An address from the table, as a pointer to what ``like_ptr`` points to; a multiple of 16, as all tensors'."""
    return tl.multiple_of(tl.load(entry_ptr).to(like_ptr.dtype), 16)


@triton.jit
def _note(moment_ptr, TIMED: tl.constexpr):
    """Write what time it is, in nanoseconds."""
    if TIMED and not INTERPRETED:
        tl.store(moment_ptr, tl.extra.cuda.globaltimer())
