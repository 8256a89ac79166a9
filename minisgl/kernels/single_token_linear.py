"""Matrix times vector: the linear layers of a step with a single token, fused with the operations around them.

With one token, a product takes as long as its weights take to arrive from memory: in a small model a few microseconds a
layer, no more than the gap between two kernels. So norm, activation and residual addition are part of the product, and
a kernel loads its first weights before the preceding one has ended (programmatic dependent launch, in NVIDIA's CUDA
programming guide). The twins are the layers in `minisgl.layers`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    residual: torch.Tensor | None = None,
) -> None:
    """Write ``W x + b`` of one token to ``out``, fused with what the options ask for.

    Args:
        x: [K], contiguous.
        weight: [N, K], contiguous; [2 N, K] if ``gated``.
        out: [N].
        bias: [N], or [2 N] if ``gated``.
        norm: [K], weight of an RMSNorm of x with ``eps``.
        gated: whether the first half of the product is the gate of the second: ``silu(gate) × up``.
        residual: [N], added to the result; may be ``out``.
    """
    size = out.shape[-1]
    width = x.shape[-1]
    block_n, block_k, num_warps = _block_sizes(width, gated)
    _linear_kernel[(triton.cdiv(size, block_n),)](
        x,
        x if norm is None else norm,
        weight,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        eps,
        N=size,
        K=width,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        DTYPE=compute_dtype(x.dtype),
        num_warps=num_warps,
        **pdl_launch_args(x.unsqueeze(0)),
    )


@triton.jit
def _linear_kernel(
    x_ptr: tl.tensor,  # [K]
    norm_ptr: tl.tensor,  # [K]
    weight_ptr: tl.tensor,  # [N or 2 N, K]
    bias_ptr: tl.tensor,  # [N or 2 N]
    residual_ptr: tl.tensor,  # [N]
    out_ptr: tl.tensor,  # [N]
    eps: tl.tensor,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """Program p: BLOCK_N of the N outputs, ``out = W x``, the dot products of rows of W with x.

    NORM: x is normalised on the way: each product is with ``x × norm weight``, the sum of squares is taken beside it,
    and its root divides the result at the end. GATED: row n of W is the gate of output n, row N + n its up projection;
    ``out = silu(gate) × up``. ADD: ``out += residual``, which may be the same memory.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    columns = tl.arange(0, BLOCK_K)
    weight, up_weight, norm_weight = load_weights(weight_ptr, norm_ptr, rows, N, columns, N, K, NORM, GATED)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    sums = tl.zeros((BLOCK_N, BLOCK_K), dtype=DTYPE)
    up_sums = sums
    squares = tl.zeros((BLOCK_K,), dtype=DTYPE)
    for start in range(0, K, BLOCK_K):
        here = start + columns
        x = tl.load(x_ptr + here, mask=here < K, other=0.0).to(DTYPE)
        next_weight, next_up, next_norm_weight = weight, up_weight, norm_weight
        if K > BLOCK_K:  # the next weights are on their way while these are used
            next_weight, next_up, next_norm_weight = load_weights(
                weight_ptr, norm_ptr, rows, N, here + BLOCK_K, N, K, NORM, GATED
            )
        if NORM:
            squares += x * x
            x *= norm_weight.to(DTYPE)
        sums += weight.to(DTYPE) * x[None, :]
        if GATED:
            up_sums += up_weight.to(DTYPE) * x[None, :]
        weight, up_weight, norm_weight = next_weight, next_up, next_norm_weight

    scale = 1.0
    if NORM:
        scale = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    out, up = tl.sum(sums, axis=1) * scale, tl.sum(up_sums, axis=1) * scale
    store_outputs(out, up, rows, N, bias_ptr, residual_ptr, out_ptr, N, BIAS, GATED, ADD, DTYPE)


@triton.jit
def store_outputs(
    out,
    up,
    rows,
    stop,
    bias_ptr,
    residual_ptr,
    out_ptr,
    N: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Add the bias to the products of some rows, gate them, add the residual stream; store those before ``stop``."""
    exists = rows < stop
    if BIAS:
        out += tl.load(bias_ptr + rows, mask=exists, other=0.0).to(DTYPE)
    if GATED:
        if BIAS:
            up += tl.load(bias_ptr + N + rows, mask=exists, other=0.0).to(DTYPE)
        out = out / (1.0 + tl.exp(-out)) * up
    if ADD:
        out += tl.load(residual_ptr + rows, mask=exists, other=0.0).to(DTYPE)
    tl.store(out_ptr + rows, out, mask=exists)


@triton.jit
def load_weights(
    weight_ptr,
    norm_ptr,
    rows,
    stop,
    columns,
    N: tl.constexpr,
    K: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
):
    """Load some columns of the rows before ``stop`` of the weight, of their up projections, and of the norm."""
    mask = (rows < stop)[:, None] & (columns < K)[None, :]
    tile = weight_ptr + rows[:, None].to(tl.int64) * K + columns[None, :]
    weight = tl.load(tile, mask=mask, other=0.0)
    up_weight, norm_weight = weight, columns
    if GATED:
        up_weight = tl.load(tile + N * K, mask=mask, other=0.0)
    if NORM:
        norm_weight = tl.load(norm_ptr + columns, mask=columns < K, other=0.0)
    return weight, up_weight, norm_weight


def _block_sizes(width: int, gated: bool) -> tuple[int, int, int]:
    """Return BLOCK_N, BLOCK_K and warps: the fastest on an H200 for Qwen3's shapes from 0.6B to 14B."""
    if width > 4096:
        return 8, 512, 4
    if width > 1024:
        return 4, triton.next_power_of_2(width), 8
    return (4 if gated else 8), triton.next_power_of_2(width), 4
