"""Matrix times vector with quantised weights: `minisgl.kernels.single_token_linear` for numbers of 8 and 4 bits.

All time goes into loading, if few instructions are spent on a weight: 13 billion weights a token leave the cores of an
H200 about four each. So a number is converted and multiplied with the input, and no more. Scales come after the sum of
a group; and ``Σ s (q − z) x = s (Σ q x − z Σ x)`` takes the zero point out of the sum as well.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args
from minisgl.kernels.single_token_linear import store_outputs


def quantized_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: tuple[int, int],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> None:
    """Write ``W x + b`` of one token to ``out``, fused as in `minisgl.kernels.single_token_linear.linear`.

    Args:
        weight: e4m3 or int8[N, K], or uint8[N, K / 2] in the order of `minisgl.layers.quantizers.Int4`; 2 N rows if
            ``gated``. Contiguous, as are the next two.
        scale: [N / rows, K / columns] of ``block``, (rows, columns); 0 columns are all.
        zero: the same, for 4 bits; None: 8.
    """
    size, width = out.shape[-1], x.shape[-1]
    bits = 4 if weight.dtype == torch.uint8 else 8
    grouped = block[1] != 0
    stored = (block[1] or 128) * bits // 8
    block_n, groups, num_warps = _block_sizes(stored, gated)
    _quantized_linear_kernel[(triton.cdiv(size, block_n),)](
        x,
        x if norm is None else norm,
        weight,
        scale,
        scale if zero is None else zero,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        eps,
        N=size,
        K=width,
        BITS=bits,
        BLOCK_ROWS=block[0],
        STORED=stored,
        SCALES=scale.shape[1],
        BLOCK_N=block_n,
        BLOCK_GROUPS=groups,
        GROUPED=grouped,
        ZERO=zero is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        DTYPE=compute_dtype(x.dtype),
        num_warps=num_warps,
        **pdl_launch_args(x.unsqueeze(0)),
    )


def fits(stored: int) -> bool:
    """Whether the kernel takes groups of so many bytes: powers of two."""
    return stored & (stored - 1) == 0 and 8 <= stored <= 1024


def _block_sizes(stored: int, gated: bool) -> tuple[int, int, int]:
    """Return BLOCK_N, BLOCK_GROUPS and warps, by calculation: 4 KB of weights at a time in each program."""
    rows = 4 if gated else 8
    return rows, max(512 // stored, 1), 4


@triton.jit
def _quantized_linear_kernel(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    weight_ptr,  # [N or 2 N, K or K / 2]
    scale_ptr,  # [N or 2 N / BLOCK_ROWS, SCALES]
    zero_ptr,  # the same
    bias_ptr,  # [N or 2 N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    STORED: tl.constexpr,
    SCALES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    GROUPED: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program p: BLOCK_N of the N outputs, BLOCK_GROUPS groups of STORED bytes of each row at a time.

    With a scale for each row (not GROUPED), the groups are only pieces of it.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    groups = tl.arange(0, BLOCK_GROUPS)
    width: tl.constexpr = K * BITS // 8
    numbers, scale, zero = _load(
        weight_ptr, scale_ptr, zero_ptr, rows, groups, N, width, BITS, BLOCK_ROWS, STORED, SCALES, GROUPED, ZERO
    )
    up_numbers, up_scale, up_zero = numbers, scale, zero
    if GATED:
        up_numbers, up_scale, up_zero = _load(
            weight_ptr, scale_ptr, zero_ptr, rows + N, groups, 2 * N, width, BITS, BLOCK_ROWS, STORED, SCALES, GROUPED,
            ZERO,
        )  # fmt: skip
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((BLOCK_N, BLOCK_GROUPS), dtype=DTYPE)
    up_sums = sums
    squares = tl.zeros((BLOCK_GROUPS,), dtype=DTYPE)
    for start in range(0, tl.cdiv(width, STORED), BLOCK_GROUPS):
        here = start + groups
        next_numbers, next_scale, next_zero = numbers, scale, zero
        next_up, next_up_scale, next_up_zero = up_numbers, up_scale, up_zero
        if width > BLOCK_GROUPS * STORED:  # the next weights are on their way while these are used
            ahead = here + BLOCK_GROUPS
            next_numbers, next_scale, next_zero = _load(
                weight_ptr, scale_ptr, zero_ptr, rows, ahead, N, width, BITS, BLOCK_ROWS, STORED, SCALES, GROUPED, ZERO
            )
            if GATED:
                next_up, next_up_scale, next_up_zero = _load(
                    weight_ptr, scale_ptr, zero_ptr, rows + N, ahead, 2 * N, width, BITS, BLOCK_ROWS, STORED, SCALES,
                    GROUPED, ZERO,
                )  # fmt: skip
        if BITS == 4:
            low, squares = _load_x(x_ptr, norm_ptr, here, 0, squares, K, 2 * STORED, STORED, NORM, DTYPE)
            high, squares = _load_x(x_ptr, norm_ptr, here, STORED, squares, K, 2 * STORED, STORED, NORM, DTYPE)
            x_sum = tl.sum(low + high, axis=1)[None, :]
            sums += (_dot_pairs(numbers, low, high, DTYPE) - zero * x_sum) * scale
            if GATED:
                up_sums += (_dot_pairs(up_numbers, low, high, DTYPE) - up_zero * x_sum) * up_scale
        else:
            x, squares = _load_x(x_ptr, norm_ptr, here, 0, squares, K, STORED, STORED, NORM, DTYPE)
            sums += tl.sum(numbers.to(tl.float32).to(DTYPE) * x[None, :, :], axis=2) * scale
            if GATED:
                up_sums += tl.sum(up_numbers.to(tl.float32).to(DTYPE) * x[None, :, :], axis=2) * up_scale
        numbers, scale, zero = next_numbers, next_scale, next_zero
        up_numbers, up_scale, up_zero = next_up, next_up_scale, next_up_zero

    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    out, up = tl.sum(sums, axis=1) * factor, tl.sum(up_sums, axis=1) * factor
    if not GROUPED:
        out *= tl.load(scale_ptr + rows // BLOCK_ROWS, mask=rows < N, other=0.0).to(DTYPE)
        if GATED:
            up *= tl.load(scale_ptr + (rows + N) // BLOCK_ROWS, mask=rows < N, other=0.0).to(DTYPE)
    store_outputs(out, up, rows, bias_ptr, residual_ptr, out_ptr, N, BIAS, GATED, ADD, DTYPE)


@triton.jit
def _load(
    weight_ptr, scale_ptr, zero_ptr, rows, groups, stop, width: tl.constexpr, BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, STORED: tl.constexpr, SCALES: tl.constexpr, GROUPED: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """Numbers of some groups of some rows, [rows, groups, STORED], and their scales and zero points, [rows, groups]."""
    place = groups[:, None] * STORED + tl.arange(0, STORED)[None, :]
    mask = (rows < stop)[:, None, None] & (place < width)[None, :, :]
    tile = weight_ptr + rows[:, None, None].to(tl.int64) * width + place[None, :, :]
    scale = tl.full((rows.shape[0], groups.shape[0]), 1.0, tl.float32)
    zero = tl.full((rows.shape[0], groups.shape[0]), 8.0, tl.float32)
    if BITS == 4:  # as an if, since both sides of an expression are compiled  # noqa: SIM108
        numbers = tl.load(tile, mask=mask, other=0)
    else:
        numbers = tl.load(tile, mask=mask, other=0.0)
    if GROUPED:
        at = (rows // BLOCK_ROWS)[:, None] * SCALES + groups[None, :]
        exists = (rows < stop)[:, None] & (groups < SCALES)[None, :]
        scale = tl.load(scale_ptr + at, mask=exists, other=0.0).to(tl.float32)
        if ZERO:
            zero = tl.load(zero_ptr + at, mask=exists, other=0.0).to(tl.float32)
    return numbers, scale, zero


@triton.jit
def _load_x(
    x_ptr, norm_ptr, groups, offset, squares, K: tl.constexpr, GROUP: tl.constexpr, STORED: tl.constexpr,
    NORM: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """STORED inputs from ``offset`` on of some groups, [groups, STORED], times the norm's weight; and their squares."""
    column = groups[:, None] * GROUP + offset + tl.arange(0, STORED)[None, :]
    x = tl.load(x_ptr + column, mask=column < K, other=0.0).to(DTYPE)
    if NORM:
        squares += tl.sum(x * x, axis=1)
        x *= tl.load(norm_ptr + column, mask=column < K, other=0.0).to(DTYPE)
    return x, squares


@triton.jit
def _dot_pairs(numbers, low, high, DTYPE: tl.constexpr):
    """Products of pairs of 4 bits, [rows, groups, STORED], with both halves of each group's inputs: [rows, groups]."""
    products = (numbers & 15).to(DTYPE) * low[None, :, :] + (numbers >> 4).to(DTYPE) * high[None, :, :]
    return tl.sum(products, axis=2)
