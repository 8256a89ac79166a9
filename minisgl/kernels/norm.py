"""Residual addition and RMSNorm in one pass over memory. Its twin is `minisgl.layers.RMSNorm.add_and_norm`.

Two kernels of PyTorch, an addition and a norm, read the sum again that they have just written. This one keeps a row in
registers: it reads two rows and writes two, which is all that has to move.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args, wide


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
