"""Two small fused kernels: residual addition with RMSNorm, and SiLU·mul, the activation of a gated MLP."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args


def add_and_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return RMSNorm(x + residual) and x + residual, all [T, size] with contiguous rows; ``weight`` is [size].

    Without a residual the sum is ``x`` itself.
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
        DTYPE=compute_dtype(x.dtype),
        num_warps=min(max(block // 256, 1), 8),
        **pdl_launch_args(x),
    )
    return normed, total


@triton.jit
def _add_and_norm_kernel(
    x_ptr: tl.tensor,  # [T, SIZE]
    residual_ptr: tl.tensor,  # [T, SIZE]
    weight_ptr: tl.tensor,  # [SIZE]
    normed_ptr: tl.tensor,  # [T, SIZE], contiguous, as total
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
    """Program t: ``total = x + residual`` of row t, rounded to the model's dtype, and ``normed = RMSNorm(total)``.

    Without ADD there is no residual, and ``total`` is not written: it is x.
    """
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
        # Rounded before it is normalised: layers below read the rounded stream, and so must this norm.
        total = (total.to(DTYPE) + residual.to(DTYPE)).to(total.dtype)
        tl.store(total_ptr + row * SIZE + columns, total, mask=mask)

    value = total.to(DTYPE)
    mean_square = tl.sum(value * value, axis=0) / SIZE
    normed = value * tl.rsqrt(mean_square + EPS) * weight
    tl.store(normed_ptr + row * SIZE + columns, normed, mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """Compute ``silu(gate) × up``: [T, 2 × n], each row contiguous → [T, n]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(size), 1024)
    _silu_and_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        DTYPE=compute_dtype(gate_up.dtype),
        **pdl_launch_args(gate_up),
    )
    return out


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,  # [T, 2 × SIZE], gate in the first half
    out_ptr: tl.tensor,  # [T, SIZE], contiguous
    row_stride: tl.tensor,  # of gate_up
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program (t, b): BLOCK columns of row t, ``out = gate × sigmoid(gate) × up``."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < SIZE
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=mask, other=0.0).to(DTYPE)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=mask, other=0.0).to(DTYPE)
    tl.store(out_ptr + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=mask)
