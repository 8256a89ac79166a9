"""Matrix times vector with quantised weights: `minisgl.kernels.single_token_linear` for numbers of 8 and 4 bits.

All time goes into loading only if few instructions are spent on a weight. A model of 14B multiplies 13 billion weights
with a token, and an H200's multiprocessors finish some 30,000 billion simple instructions a second, conversions at half
of that rate: with ten instructions a weight, they would take three times as long as 4 bits take to arrive. So numbers
become floats two or more at a time, a thread adds up the products of its own bytes before it multiplies by their scale,
and threads exchange sums only once, at the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels import single_token_stream
from minisgl.kernels.launch import INTERPRETED, compute_dtype, pdl_launch_args
from minisgl.kernels.quantized_linear import quantized_layout
from minisgl.kernels.single_token_linear import store_outputs

_CHUNK = 512  # bytes of a row at a time: 16 for each thread of a warp
_FEW_ROWS = 8192
_KINDS = {torch.float8_e4m3fn: "fp8", torch.int8: "int8", torch.uint8: "int4"}


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
    if single_token_stream.fits(x, weight, block):
        single_token_stream.linear(
            x, weight, scale, zero, block, out, bias=bias, norm=norm, eps=eps, gated=gated, residual=residual
        )
        return
    size = out.shape[-1]
    layout = quantized_layout(x.unsqueeze(0), weight, scale, block)
    # More programs than multiprocessors can hold unevenly, each with enough rows to be worth loading x for.
    block_n = 4 if size <= _FEW_ROWS or gated else 8
    _single_token_kernel[(triton.cdiv(size, block_n),)](
        x,
        x if norm is None else norm,
        weight.view(torch.int32),
        scale,
        scale if zero is None else zero,
        x if bias is None else bias,
        out if residual is None else residual,
        out,
        eps,
        N=size,
        K=layout.columns,
        KIND=_KINDS[weight.dtype],
        BLOCK_ROWS=layout.block_rows,
        GROUPS=layout.groups,
        STORED=layout.stored,
        LANE=min(layout.stored & -layout.stored, 16),
        CHUNK=_CHUNK,
        BLOCK_N=block_n,
        ZERO=zero is not None,
        NORM=norm is not None,
        BIAS=bias is not None,
        GATED=gated,
        ADD=residual is not None,
        DTYPE=compute_dtype(x.dtype),
        num_warps=1,
        **pdl_launch_args(x.unsqueeze(0)),
    )


@triton.jit
def _single_token_kernel(
    x_ptr,  # [K]
    norm_ptr,  # [K]
    weight_ptr,  # int32[N or 2 N, K / 4 or K / 8]
    scale_ptr,  # [N or 2 N / BLOCK_ROWS, GROUPS]
    zero_ptr,  # the same
    bias_ptr,  # [N or 2 N]
    residual_ptr,  # [N]
    out_ptr,  # [N]
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED: tl.constexpr,
    LANE: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ZERO: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program p: BLOCK_N of the N outputs. LANE bytes that follow each other lie in one group and in one thread."""
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    along, words_along = tl.arange(0, CHUNK), tl.arange(0, CHUNK // 4)
    width: tl.constexpr = K // 2 if KIND == "int4" else K  # bytes of a row
    words, up_words = _load_words(weight_ptr, row, words_along, N, width // 4, GATED)
    if USE_PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    total = tl.zeros((BLOCK_N, CHUNK // LANE), dtype=DTYPE)
    up_total = total
    squares = tl.zeros((CHUNK,), dtype=DTYPE)
    for start in range(0, width, CHUNK):
        next_words, next_up = words, up_words
        if width > CHUNK:  # the next numbers are on their way while these are used
            place = (start + CHUNK) // 4 + words_along
            next_words, next_up = _load_words(weight_ptr, row, place, N, width // 4, GATED)
        place = start + along
        inside = place < width
        column = (
            place + place // STORED * STORED if KIND == "int4" else place
        )  # a group has twice as many columns as bytes
        x, squares = _load_inputs(x_ptr, norm_ptr, column, inside, squares, NORM, DTYPE)
        high = x
        if KIND == "int4":
            high, squares = _load_inputs(x_ptr, norm_ptr, column + STORED, inside, squares, NORM, DTYPE)
        lane = start + tl.arange(0, CHUNK // LANE) * LANE
        group = tl.minimum(lane // STORED, GROUPS - 1)
        total += _products(
            words, x, high, scale_ptr, zero_ptr, row, group, row < N, KIND, BLOCK_ROWS, GROUPS, LANE, ZERO, DTYPE
        )
        if GATED:
            up_total += _products(
                up_words, x, high, scale_ptr, zero_ptr, row + N, group, row < N, KIND, BLOCK_ROWS, GROUPS, LANE, ZERO,
                DTYPE,
            )  # fmt: skip
        words, up_words = next_words, next_up

    factor = 1.0
    if NORM:
        factor = tl.rsqrt(tl.sum(squares, axis=0) / K + eps)
    out, up = tl.sum(total, axis=1) * factor, tl.sum(up_total, axis=1) * factor
    if GROUPS == 1:
        out *= tl.load(scale_ptr + row // BLOCK_ROWS, mask=row < N, other=0.0).to(DTYPE)
        if GATED:
            up *= tl.load(scale_ptr + (row + N) // BLOCK_ROWS, mask=row < N, other=0.0).to(DTYPE)
    store_outputs(out, up, row, N, bias_ptr, residual_ptr, out_ptr, N, BIAS, GATED, ADD, DTYPE)


@triton.jit
def _load_words(weight_ptr, row, place, N: tl.constexpr, width: tl.constexpr, GATED: tl.constexpr):
    """Some words of four bytes of a program's rows, and of their up projections."""
    mask = (row < N)[:, None] & (place < width)[None, :]
    tile = weight_ptr + row.to(tl.int64)[:, None] * width + place[None, :]
    words = tl.load(tile, mask=mask, other=0)
    up_words = words
    if GATED:
        up_words = tl.load(tile + N * width, mask=mask, other=0)
    return words, up_words


@triton.jit
def _load_inputs(x_ptr, norm_ptr, column, inside, squares, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """Some of the inputs, times the norm's weight, and their squares, added up."""
    x = tl.load(x_ptr + column, mask=inside, other=0.0).to(DTYPE)
    if NORM:
        squares += x * x
        x *= tl.load(norm_ptr + column, mask=inside, other=0.0).to(DTYPE)
    return x, squares


@triton.jit
def _products(
    words, x, high, scale_ptr, zero_ptr, row, group, is_row, KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr, LANE: tl.constexpr, ZERO: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """The sum over each lane of some numbers; ``high`` are the inputs of the high halves of pairs."""
    scales = (row // BLOCK_ROWS * GROUPS)[:, None] + group[None, :]
    if KIND == "int4":
        b0, b1, b2, b3, h0, h1, h2, h3 = _numbers_of_4_bits(words)
        sums = _sum_lanes(b0, b1, b2, b3, x, LANE, DTYPE) + _sum_lanes(h0, h1, h2, h3, high, LANE, DTYPE)
        if ZERO:
            zero = tl.load(zero_ptr + scales, mask=is_row[:, None], other=8.0).to(DTYPE)
            sums += (8.0 - zero) * _lanes(x[None, :] + high[None, :], LANE)
    else:
        b0, b1, b2, b3 = _numbers_of_8_bits(words, KIND)
        sums = _sum_lanes(b0, b1, b2, b3, x, LANE, DTYPE)
    if GROUPS > 1:
        sums *= tl.load(scale_ptr + scales, mask=is_row[:, None], other=0.0).to(DTYPE)
    return sums


@triton.jit
def _sum_lanes(b0, b1, b2, b3, x, LANE: tl.constexpr, DTYPE: tl.constexpr):
    """Products of numbers with inputs, [K], added up in lanes; ``b1`` are the second ones of each word, [N, K / 4]."""
    numbers = tl.join(tl.join(b0, b2), tl.join(b1, b3))
    numbers = tl.reshape(numbers, (b0.shape[0], b0.shape[1] * 4))
    return _lanes(numbers.to(DTYPE) * x[None, :], LANE)


@triton.jit
def _lanes(products, LANE: tl.constexpr):
    """Sums of LANE numbers that follow each other: [N, K] → [N, K / LANE]."""
    return tl.sum(tl.reshape(products, (products.shape[0], products.shape[1] // LANE, LANE)), axis=2)


@triton.jit
def _byte(words, index: tl.constexpr):
    return (words >> 8 * index) & 255


@triton.jit
def _numbers_of_8_bits(words, KIND: tl.constexpr):
    """The four numbers of each word, e4m3 or int8, as float32."""
    if KIND == "int8":
        b0, b1, b2, b3 = words << 24 >> 24, words << 16 >> 24, words << 8 >> 24, words >> 24
        return b0.to(tl.float32), b1.to(tl.float32), b2.to(tl.float32), b3.to(tl.float32)
    if INTERPRETED:
        b0, b1 = _byte(words, 0).to(tl.uint8), _byte(words, 1).to(tl.uint8)
        b2, b3 = _byte(words, 2).to(tl.uint8), _byte(words, 3).to(tl.uint8)
        return (
            b0.to(tl.float8e4nv, bitcast=True).to(tl.float32), b1.to(tl.float8e4nv, bitcast=True).to(tl.float32),
            b2.to(tl.float8e4nv, bitcast=True).to(tl.float32), b3.to(tl.float8e4nv, bitcast=True).to(tl.float32),
        )  # fmt: skip
    # Triton would take the word apart byte by byte; the GPU converts two at a time.
    return tl.inline_asm_elementwise(
        """{
        .reg .b16 low, high, a, b, c, d;
        .reg .b32 pair;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 pair, low;
        mov.b32 {a, b}, pair;
        cvt.rn.f16x2.e4m3x2 pair, high;
        mov.b32 {c, d}, pair;
        cvt.f32.f16 $0, a;
        cvt.f32.f16 $1, b;
        cvt.f32.f16 $2, c;
        cvt.f32.f16 $3, d;
        }""",
        "=f,=f,=f,=f,r",
        [words],
        dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
        is_pure=True,
        pack=1,
    )


@triton.jit
def _numbers_of_4_bits(words):
    """The low and the high halves of the four bytes of each word, minus 8, as float32."""
    if INTERPRETED:
        b0, b1, b2, b3 = _byte(words, 0), _byte(words, 1), _byte(words, 2), _byte(words, 3)
        return (
            (b0 & 15).to(tl.float32) - 8.0, (b1 & 15).to(tl.float32) - 8.0,
            (b2 & 15).to(tl.float32) - 8.0, (b3 & 15).to(tl.float32) - 8.0,
            (b0 >> 4).to(tl.float32) - 8.0, (b1 >> 4).to(tl.float32) - 8.0,
            (b2 >> 4).to(tl.float32) - 8.0, (b3 >> 4).to(tl.float32) - 8.0,
        )  # fmt: skip
    # 0x4B000000 is 2²³ as a float32, and its last bits count in ones: with four bits of a word set in their place p it
    # is 2²³ + 2ᵖ q. One multiplication by 2⁻ᵖ and one addition leave q − 8, exactly.
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 upper, bits;
        .reg .f32 number;
        shr.u32 upper, $8, 16;
        lop3.b32 bits, $8, 0x0000000F, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        add.f32 $0, number, 0fCB000008;
        lop3.b32 bits, $8, 0x000000F0, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $4, number, 0f3D800000, 0fC9000080;
        lop3.b32 bits, $8, 0x00000F00, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $1, number, 0f3B800000, 0fC7000800;
        lop3.b32 bits, $8, 0x0000F000, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $5, number, 0f39800000, 0fC5008000;
        lop3.b32 bits, upper, 0x0000000F, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        add.f32 $2, number, 0fCB000008;
        lop3.b32 bits, upper, 0x000000F0, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $6, number, 0f3D800000, 0fC9000080;
        lop3.b32 bits, upper, 0x00000F00, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $3, number, 0f3B800000, 0fC7000800;
        lop3.b32 bits, upper, 0x0000F000, 0x4B000000, 0xEA;
        mov.b32 number, bits;
        fma.rn.f32 $7, number, 0f39800000, 0fC5008000;
        }""",
        "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,r",
        [words],
        dtype=(tl.float32,) * 8,
        is_pure=True,
        pack=1,
    )
