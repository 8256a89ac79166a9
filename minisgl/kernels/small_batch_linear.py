"""The linear layers of a decode step with some dozen tokens, fused with what stands around them.

Between one token, where nothing counts but the reading of weights, and a thousand, where nothing counts but
multiplications, lie the decode steps that a server spends its life in. In a small model each of their matrix products
takes a few microseconds, and so does every little kernel before and after. Here the norm is part of the product that
follows it, the activation and the residual addition are part of the product before, and each kernel starts while the
one before it ends, with its first weights fetched already (programmatic dependent launch). The twins are the layers
in `minisgl.layers`; what a program does is the textbook's tiled matrix product.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, launch_early


@triton.jit
def _load_weights(tile, output_exists, columns, N: tl.constexpr, K: tl.constexpr, GATED: tl.constexpr):
    """The weights of a tile's outputs for some inputs, [BLOCK_K, BLOCK_N], and those of their up projections."""
    mask = output_exists[None, :] & (columns < K)[:, None]
    weight = tl.load(tile, mask=mask, other=0.0)
    up_weight = weight
    if GATED:
        up_weight = tl.load(tile + N * K, mask=mask, other=0.0)
    return weight, up_weight


@triton.jit
def _multiply(
    x_tile, norm_ptr, weight, up_weight, row_exists, columns, sums, up_sums, squares,
    K: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """Add the products with some inputs to the sums, and the squares of these inputs to theirs."""
    exists = columns < K
    x = tl.load(x_tile, mask=row_exists & exists[None, :], other=0.0)
    if NORM:
        value = x.to(tl.float32)
        squares += tl.sum(value * value, axis=1)
        gain = tl.load(norm_ptr + columns, mask=exists, other=0.0).to(tl.float32)
        x = (value * gain[None, :]).to(x.dtype)
    if WIDEN:
        x, weight, up_weight = x.to(tl.float32), weight.to(tl.float32), up_weight.to(tl.float32)
    sums = tl.dot(x, weight, sums, input_precision="ieee")
    if GATED:
        up_sums = tl.dot(x, up_weight, up_sums, input_precision="ieee")
    return sums, up_sums, squares


@triton.jit(do_not_specialize=["num_rows"])
def _linear_kernel(
    x_ptr,
    norm_ptr,
    weight_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    eps,
    num_rows,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WIDEN: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Program (n, m): a tile of the output, BLOCK_M rows by BLOCK_N columns, by a loop over the K inputs.

    NORM: x is normalised on the way. Products are with ``x × norm weight``; the sums of squares are taken beside them,
    and the roots divide the result at the end. GATED: the tile is computed twice, from the gate's weights and, N rows
    below, from those of the up projection: ``out = silu(gate) × up``. ADD: ``out += residual``, which may be the same
    memory.

    x: [num_rows, K]. norm: [K]. weight: [N or 2 N, K]. bias: [N or 2 N]. residual, out: [num_rows, N]. WIDEN: for the
    interpreter, whose products do not know bfloat16.
    """
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    row_exists = (rows < num_rows)[:, None]
    output_exists = outputs < N
    x_tile = x_ptr + rows[:, None] * K + columns[None, :]
    weight_tile = weight_ptr + outputs[None, :].to(tl.int64) * K + columns[:, None]

    weight, up_weight = _load_weights(weight_tile, output_exists, columns, N, K, GATED)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up_sums = sums
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    sums, up_sums, squares = _multiply(
        x_tile, norm_ptr, weight, up_weight, row_exists, columns, sums, up_sums, squares, K, NORM, GATED, WIDEN
    )
    for start in range(BLOCK_K, K, BLOCK_K):
        weight, up_weight = _load_weights(weight_tile + start, output_exists, start + columns, N, K, GATED)
        sums, up_sums, squares = _multiply(
            x_tile + start, norm_ptr, weight, up_weight, row_exists, start + columns, sums, up_sums, squares,
            K, NORM, GATED, WIDEN,
        )  # fmt: skip

    scale = tl.full((BLOCK_M,), 1.0, tl.float32)
    if NORM:
        scale = tl.rsqrt(squares / K + eps)
    out = sums * scale[:, None]
    if BIAS:
        out += tl.load(bias_ptr + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
    if GATED:
        up = up_sums * scale[:, None]
        if BIAS:
            up += tl.load(bias_ptr + N + outputs, mask=output_exists, other=0.0).to(tl.float32)[None, :]
        out = out / (1.0 + tl.exp(-out)) * up
    target = rows[:, None] * N + outputs[None, :]
    exists = row_exists & output_exists[None, :]
    if ADD:
        out += tl.load(residual_ptr + target, mask=exists, other=0.0).to(tl.float32)
    tl.store(out_ptr + target, out.to(out_ptr.dtype.element_ty), mask=exists)


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x Wᵀ + b``, with what is asked for before and after. Sums are float32.

    Args:
        x: [T, K], contiguous.
        weight: [N, K], contiguous; [2 N, K] if ``gated``.
        bias: [N], or [2 N] if ``gated``.
        norm: [K] weight of an RMSNorm of x.
        eps: of that norm.
        gated: whether the first half of the product is the gate of the second: ``silu(gate) × up``.
        residual: [T, N] the result is added to this, in place.

    Returns:
        [T, N], ``residual`` if there is one.
    """
    rows, width = x.shape
    size = len(weight) // 2 if gated else len(weight)
    out = x.new_empty((rows, size)) if residual is None else residual
    block_m, block_n, block_k, num_warps, num_stages = _tile(rows, size, width, gated)
    _linear_kernel[(triton.cdiv(size, block_n), triton.cdiv(rows, block_m))](
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out,
        out,
        eps,
        rows,
        N=size,
        K=width,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        WIDEN=INTERPRETED,
        num_warps=num_warps,
        num_stages=num_stages,
        **launch_early(x),
    )
    return out


def _tile(rows: int, size: int, width: int, gated: bool) -> tuple[int, int, int, int, int]:
    """BLOCK_M, BLOCK_N, BLOCK_K, warps and stages: as many programs as multiprocessors, or a few times as many."""
    block_m = min(max(triton.next_power_of_2(rows), 16), 64)
    block_k = min(max(triton.next_power_of_2(width), 16), 128)
    programs = triton.cdiv(rows, block_m) * size
    block_n = 16 if programs < 132 * 32 else 32 if programs < 132 * 64 or gated else 64
    return block_m, block_n, block_k, 4, 3
