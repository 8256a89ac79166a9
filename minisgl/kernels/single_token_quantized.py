"""Matrix times vector with quantised weights: `minisgl.kernels.single_token_linear` for numbers of 8 and 4 bits.

All time goes into loading only if few instructions are spent on a weight. A model of 14B multiplies 13 billion weights
with a token, and an H200 can issue 30,000 billion instructions a second: with ten instructions a weight, they would
take three times as long as 4 bits take to arrive. Tensor cores need the fewest, though they multiply one token as if it
were 16 of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import compute_dtype, pdl_launch_args
from minisgl.kernels.quantized_linear import quantized_layout, sum_chunks
from minisgl.kernels.single_token_linear import store_outputs

_UNROLL = 4  # chunks whose scales are loaded at the same time
_FEW_ROWS = 8192


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
    size = out.shape[-1]
    layout = quantized_layout(x.unsqueeze(0), weight, scale, block)
    # Enough programs for all multiprocessors, each with enough rows in flight.
    block_n, num_warps = (16, 2) if size <= _FEW_ROWS else (32, 4)
    chunks = triton.cdiv(layout.columns * layout.bits // 8, layout.chunk)
    _single_token_kernel[(triton.cdiv(size, block_n),)](
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
        K=layout.columns,
        BITS=layout.bits,
        BLOCK_ROWS=layout.block_rows,
        GROUPS=layout.groups,
        STORED=layout.stored,
        CHUNK=layout.chunk,
        COUNT=triton.cdiv(chunks, _UNROLL) * _UNROLL,
        UNROLL=_UNROLL,
        BLOCK_N=block_n,
        ZERO=zero is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        DTYPE=compute_dtype(x.dtype),
        num_warps=num_warps,
        num_stages=3,
        **pdl_launch_args(x.unsqueeze(0)),
    )


@triton.jit
def _single_token_kernel(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    weight_ptr,  # [N or 2 N, K or K / 2]
    scale_ptr,  # [N or 2 N / BLOCK_ROWS, GROUPS]
    zero_ptr,  # the same
    bias_ptr,  # [N or 2 N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT: tl.constexpr,
    UNROLL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program p: BLOCK_N of the N outputs."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    token = tl.arange(0, 1)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    out, up, squares = sum_chunks(
        x_ptr, norm_ptr, weight_ptr, scale_ptr, zero_ptr, token, token < 1, row, 0, COUNT, N, K, BITS, BLOCK_ROWS,
        GROUPS, STORED, CHUNK, UNROLL, ZERO, NORM, GATED, 1, BLOCK_N, DTYPE,
    )  # fmt: skip
    if NORM:
        factor = tl.rsqrt(squares / K + eps)[:, None]
        out, up = out * factor, up * factor
    out, up = tl.sum(out, axis=0), tl.sum(up, axis=0)
    store_outputs(out, up, row, bias_ptr, residual_ptr, out_ptr, N, BIAS, GATED, ADD, DTYPE)
