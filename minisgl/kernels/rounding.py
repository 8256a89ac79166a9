"""RMSNorm and SiLU × up for a product of e4m3 behind them: the same kernel rounds the row that it has in registers.

The numbers are those of `minisgl.kernels.norm` and then `quantize_rows`, bit by bit, but the row is neither written nor
read in the model's dtype. The program needs the whole row, since the row's largest number decides about its scale.

The dozen lines of the norm stand in both files on purpose: that kernel is a task of the course, and would be harder to
read with what only fp8 needs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args, to_kv_dtype


def add_norm_and_round(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`add_and_norm` with its first result rounded: e4m3[T, size], the scales of its rows, float32[T, 1], and the sum.

    Without a residual the sum is ``x`` itself.
    """
    rows, size = x.shape
    numbers, scale = _empty_rows(rows, size, x.device)
    total = x if residual is None else torch.empty((rows, size), dtype=x.dtype, device=x.device)
    stream = x if residual is None else residual
    block = triton.next_power_of_2(size)
    _add_norm_and_round_kernel[(rows,)](
        x,
        stream,
        weight,
        numbers,
        scale,
        total,
        x.stride(0),
        stream.stride(0),
        EPS=eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        DTYPE=compute_dtype(x.dtype),
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(x),
    )
    return numbers, scale, total


def _empty_rows(rows: int, size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.empty((rows, size), dtype=torch.float8_e4m3fn, device=device)
    return numbers, torch.empty((rows, 1), dtype=torch.float32, device=device)


@triton.jit
def _add_norm_and_round_kernel(
    x_ptr: tl.tensor,  # [T, SIZE]
    residual_ptr: tl.tensor,  # [T, SIZE]
    weight_ptr: tl.tensor,  # [SIZE]
    numbers_ptr: tl.tensor,  # e4m3[T, SIZE], contiguous, as total
    scale_ptr: tl.tensor,  # float32[T]
    total_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,  # the power of two that a row fits in
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program t: `_add_and_norm_kernel` of row t, which is rounded to the model's dtype, and then to e4m3."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(DTYPE)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    total = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=mask, other=0.0)
        total = (total.to(DTYPE) + residual.to(DTYPE)).to(total.dtype)
        tl.store(total_ptr + row * SIZE + columns, total, mask=mask)

    value = total.to(DTYPE)
    mean_square = tl.sum(value * value, axis=0) / SIZE
    normed = (value * tl.rsqrt(mean_square + EPS) * weight).to(total.dtype)
    scale = _scale_of(_largest(normed))
    tl.store(scale_ptr + row, scale)
    # As many a thread as it loads at once, 128 bits: so squares are added up in the order of `_add_and_norm_kernel`.
    columns = tl.max_contiguous(columns, 128 // total.dtype.primitive_bitwidth)
    _store_rounded(normed, scale, numbers_ptr, row * SIZE + columns, mask)


def silu_mul_and_round(gate_up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`silu_and_mul`, rounded: [T, 2 × n], each row contiguous → e4m3[T, n] and the rows' scales, float32[T, 1]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    numbers, scale = _empty_rows(rows, size, gate_up.device)
    first = triton.next_power_of_2(size) // 2
    _silu_mul_and_round_kernel[(rows,)](
        gate_up,
        numbers,
        scale,
        gate_up.stride(0),
        SIZE=size,
        FIRST=first,
        REST=triton.next_power_of_2(size - first),
        DTYPE=compute_dtype(gate_up.dtype),
        num_warps=min(max(first // 1024, 1), 16),
        **pdl_launch_args(gate_up),
    )
    return numbers, scale


@triton.jit
def _silu_mul_and_round_kernel(
    gate_up_ptr: tl.tensor,  # [T, 2 × SIZE], gate in the first half
    numbers_ptr: tl.tensor,  # e4m3[T, SIZE], contiguous
    scale_ptr: tl.tensor,  # float32[T]
    row_stride: tl.tensor,  # of gate_up
    SIZE: tl.constexpr,
    FIRST: tl.constexpr,
    REST: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program t: ``gate × sigmoid(gate) × up`` of row t, rounded to the model's dtype, and then to e4m3.

    The row is held as two tiles of FIRST and REST columns, powers of two. Few columns of these lie beyond its end: of
    17,408, none, where a single tile would be almost twice as wide.
    """
    row = tl.program_id(0).to(tl.int64)
    first = tl.arange(0, FIRST)
    rest = FIRST + tl.arange(0, REST)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    first_out = _silu_and_mul(gate_up_ptr + row * row_stride, first, SIZE, DTYPE)
    rest_out = _silu_and_mul(gate_up_ptr + row * row_stride, rest, SIZE, DTYPE)
    scale = _scale_of(tl.maximum(_largest(first_out), _largest(rest_out)))
    tl.store(scale_ptr + row, scale)
    _store_rounded(first_out, scale, numbers_ptr, row * SIZE + first, first < SIZE)
    _store_rounded(rest_out, scale, numbers_ptr, row * SIZE + rest, rest < SIZE)


@triton.jit
def _silu_and_mul(gate_up_ptr: tl.tensor, columns: tl.tensor, SIZE: tl.constexpr, DTYPE: tl.constexpr) -> tl.tensor:
    mask = columns < SIZE
    gate = tl.load(gate_up_ptr + columns, mask=mask, other=0.0)
    up = tl.load(gate_up_ptr + SIZE + columns, mask=mask, other=0.0).to(DTYPE)
    wide = gate.to(DTYPE)
    return (wide / (1.0 + tl.exp(-wide)) * up).to(gate.dtype)


@triton.jit
def _largest(x: tl.tensor) -> tl.tensor:
    return tl.max(tl.abs(x.to(tl.float32)), axis=0)


@triton.jit
def _scale_of(largest: tl.tensor) -> tl.tensor:
    """The scale of a row, as `_quantize_rows_kernel` has it."""
    return tl.maximum(largest, 1e-12) / 448.0


@triton.jit
def _store_rounded(x: tl.tensor, scale: tl.tensor, numbers_ptr: tl.tensor, places: tl.tensor, mask: tl.tensor) -> None:
    tl.store(numbers_ptr + places, to_kv_dtype(x.to(tl.float32) / scale, numbers_ptr), mask=mask)
