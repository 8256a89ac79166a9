"""The two small fused kernels of a layer: residual + RMSNorm, and SiLU·mul."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args, wide


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program a row and BLOCK columns: ``out = gate × sigmoid(gate) × up``.

    gate_up: [T, 2 × SIZE] with any row stride, gate in the first half. out: [T, SIZE], contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < SIZE
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=exists, other=0.0).to(WIDE)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=exists, other=0.0).to(WIDE)
    tl.store(out_ptr + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=exists)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) × up``, [T, 2 × n] with each row contiguous → [T, n]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(size), 1024)
    _silu_and_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        WIDE=wide(gate_up.dtype),
        **pdl_launch_args(gate_up),
    )
    return out


@triton.jit
def _add_and_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    normed_ptr: tl.tensor,
    total_ptr: tl.tensor,
    x_stride: tl.tensor,
    residual_stride: tl.tensor,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program a row: ``total = x + residual`` rounded to the model's dtype, ``normed = RMSNorm(total)``.

    x, residual: [T, SIZE] with any row stride. weight: [SIZE]. normed, total: [T, SIZE], contiguous. BLOCK is the power
    of two that a row fits in. Without ADD there is no residual, and the total is x.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    exists = columns < SIZE
    weight = tl.load(weight_ptr + columns, mask=exists, other=0.0).to(WIDE)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()

    total = tl.load(x_ptr + row * x_stride + columns, mask=exists, other=0.0)
    if ADD:
        residual = tl.load(residual_ptr + row * residual_stride + columns, mask=exists, other=0.0)
        # Rounded before it is normalised: layers below read the rounded stream, and so must this norm.
        total = (total.to(WIDE) + residual.to(WIDE)).to(total.dtype)
        tl.store(total_ptr + row * SIZE + columns, total, mask=exists)

    value = total.to(WIDE)
    mean_square = tl.sum(value * value, axis=0) / SIZE
    normed = value * tl.rsqrt(mean_square + EPS) * weight
    tl.store(normed_ptr + row * SIZE + columns, normed, mask=exists)


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add ``x`` to the residual stream and normalise the sum.

    Args:
        x: [T, size], each row contiguous.
        residual: as ``x``; None at the stream's source.
        weight: [size] of the norm.
        eps: of the norm.

    Returns:
        The normalised sum and the sum, [T, size] each; without a residual the sum is ``x`` itself.
    """
    rows, size = x.shape
    normed = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    total = x if residual is None else torch.empty_like(normed)
    stream = x if residual is None else residual
    block = triton.next_power_of_2(size)
    _add_and_norm_kernel[(rows,)](
        x,
        stream,
        weight,
        normed,
        total,
        x.stride(0),
        stream.stride(0),
        EPS=eps,
        SIZE=size,
        BLOCK=block,
        ADD=residual is not None,
        WIDE=wide(x.dtype),
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(x),
    )
    return normed, total
