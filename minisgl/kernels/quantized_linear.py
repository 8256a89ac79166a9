"""Products with quantised weights on a GPU: small numbers are read, and become floats in registers.

A product with few tokens could take as long as its weights take to arrive, one of 4 bits a quarter of bfloat16's time.
With up to 8 tokens `minisgl.kernels.few_tokens` comes near, where it can. Up to 64 tokens these kernels beat bfloat16;
with 256, numbers of 4 bits are half as fast (``benchmarks/notes.md``).

Each program has some outputs, and if there are too few outputs to fill the GPU, a part of the inputs (split-K).
Products with very many tokens are held by arithmetic: fp8 tensor cores multiply e4m3 by e4m3 (``torch._scaled_mm``),
other weights are written out as bfloat16 once, which is little beside the product.

The twins are the quantisers in `minisgl.layers.quantizers`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from minisgl.kernels import few_tokens
from minisgl.kernels.experts import sum_parts
from minisgl.kernels.launch import INTERPRETED, compute_dtype, pdl_launch_args, to_kv_dtype

# From so many tokens on, by bits of a number, writing the weight out as floats takes less time than cuBLAS saves over
# our kernel. 4 bits were measured on an H200, the tiles below on an H100.
DEQUANTIZE_TOKENS = {4: 193, 8: 288}
# Up to so many tokens, cuBLAS with one scale and a second kernel that applies the others take less time together than
# the product with row-wise scales, whose tiles are too few. Measured on an H200.
SCALE_AFTERWARDS_TOKENS = 256
LEAST_CHUNK = 16
"""Tensor cores multiply so many columns at least."""
_PROGRAMS = 264  # two for each multiprocessor of an H200
_MAX_SPLITS = 8


def fp8_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    block: tuple[int, int],
    bias: torch.Tensor | None,
    quantize_activations: bool,
) -> torch.Tensor:
    """``x Wᵀ + b`` for e4m3[N, K] and float32 scales of blocks, [N / rows, K / columns]; 0 columns are all.

    ``quantize_activations``: round ``x`` to e4m3 too, each row with its own scale.
    """
    rows, columns = weight.shape
    if quantize_activations and block == (1, 0) and rows % 16 == 0 and columns % 16 == 0:
        return rounded_linear(*quantize_rows(x), weight, weight_scale, bias).to(x.dtype)
    return _linear(x, weight, weight_scale, None, block, bias)


def rounded_linear(
    numbers: torch.Tensor,
    scale: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``x Wᵀ + b`` in bfloat16 for rows as `quantize_rows` rounds them; N and K of the weight are multiples of 16."""
    # Products of e4m3 may be too large for float16, and row-wise scales are only there with bfloat16 results.
    half = None if bias is None else bias.to(torch.bfloat16)
    if len(numbers) > SCALE_AFTERWARDS_TOKENS:
        return _multiply_fp8(numbers, weight, scale, weight_scale.T, half)
    one = _one(numbers.device)
    out = _multiply_fp8(numbers, weight, one, one, None)
    scale_product(out, scale, weight_scale, half)
    return out


def _multiply_fp8(
    x: torch.Tensor, weight: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """``scales × (x Wᵀ) + b`` in bfloat16.

    Sums stay in the tensor cores to the end, in fewer bits than float32 has. That's an error of 0.2 to 0.4 % of a
    product, where rounding both of its sides to e4m3 costs nearly 4 (``benchmarks/notes.md``).
    """
    out: torch.Tensor = torch._scaled_mm(
        x, weight.T, x_scale, weight_scale, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )
    return out


def int8_linear(
    x: torch.Tensor, weight: torch.Tensor, weight_scale: torch.Tensor, group_size: int, bias: torch.Tensor | None
) -> torch.Tensor:
    """``x Wᵀ + b`` for int8[N, K] and float32 scales of rows, [N, 1], or of groups, [N, K / group_size]."""
    return _linear(x, weight, weight_scale, None, (1, group_size), bias)


def int4_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_zero: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """``x Wᵀ + b`` for uint8[N, K / 2], in the order of `minisgl.layers.quantizers.Int4`.

    Scales and zero points are float16[N, K / group_size].
    """
    group_size = 2 * weight.shape[1] // weight_scale.shape[1]
    return _linear(x, weight, weight_scale, weight_zero, (1, group_size), bias)


class QuantizedLayout(NamedTuple):
    """How the kernels walk along a row: in chunks, each inside of one group."""

    bits: int
    columns: int  # K
    block_rows: int  # rows that share a scale
    groups: int  # scales of a row
    stored: int  # stored numbers (bytes) of a group
    chunk: int  # of these, how many at a time: a power of two


def quantized_layout(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]
) -> QuantizedLayout:
    """The layout of a weight for inputs [T, K], where ``block`` is the weights that share a scale."""
    bits = 4 if weight.dtype == torch.uint8 else 8
    columns = x.shape[1]
    stored = (block[1] or columns) * bits // 8
    chunk = 128 if block[1] == 0 else min(stored & -stored, 128)
    return QuantizedLayout(bits, columns, block[0], scale.shape[1], stored, chunk)


def _linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: tuple[int, int],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    x = x.contiguous()
    layout = quantized_layout(x, weight, scale, block)
    tokens, rows = len(x), len(weight)
    if tokens >= DEQUANTIZE_TOKENS[layout.bits] or layout.chunk < LEAST_CHUNK:
        return F.linear(x, dequantize(x, weight, scale, zero, block), bias)
    out = torch.empty((tokens, rows), dtype=x.dtype, device=x.device)
    if not tokens:
        return out
    if few_tokens.fits(x, weight, block):
        few_tokens.linear(x, weight, scale, zero, block, out, bias=bias)
        return out
    block_m, block_n, num_warps, num_stages = _tile(tokens, x.dtype)
    tiles = triton.cdiv(tokens, block_m) * triton.cdiv(rows, block_n)
    chunks = triton.cdiv(layout.columns * layout.bits // 8, layout.chunk)
    splits = max(1, min(_PROGRAMS // tiles, _MAX_SPLITS, chunks // 4))
    sums = torch.promote_types(x.dtype, torch.float32)
    target = out if splits == 1 else torch.empty((tokens, splits, rows), dtype=sums, device=x.device)
    _gemm_kernel[(triton.cdiv(rows, block_n), triton.cdiv(tokens, block_m), splits)](
        x,
        weight,
        scale,
        scale if zero is None else zero,
        x if bias is None else bias,
        target,
        tokens,
        N=rows,
        K=layout.columns,
        BITS=layout.bits,
        BLOCK_ROWS=layout.block_rows,
        GROUPS=layout.groups,
        STORED=layout.stored,
        CHUNK=layout.chunk,
        CHUNKS=chunks,
        SPLITS=splits,
        ZERO=zero is not None,
        BIAS=bias is not None,
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        DTYPE=compute_dtype(x.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        **pdl_launch_args(x),
    )
    if splits > 1:
        sum_parts(target, out)
    return out


def _tile(tokens: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
    """Return BLOCK_M, BLOCK_N, warps and stages."""
    if dtype.itemsize > 2:  # no fast matrix instruction; the multiplications are unrolled
        return 16, 32, 4, 2
    if tokens <= 16:
        return 16, 64, 4, 4
    if tokens <= 32:
        return 32, 128, 4, 4
    return 64, 128, 4, 3  # each number is unpacked anew for every 64 tokens; larger tiles leave too few programs


@triton.jit
def _gemm_kernel(
    x_ptr,  # [tokens, K]
    weight_ptr,  # [N, K], or [N, K / 2] of pairs
    scale_ptr,  # [N / BLOCK_ROWS, GROUPS]
    zero_ptr,  # the same
    bias_ptr,  # [N]
    out_ptr,  # [tokens, N], or float32[tokens, SPLITS, N]
    tokens,
    N: tl.constexpr,
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    SPLITS: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (n, m, s): BLOCK_N outputs of BLOCK_M tokens, summed over the chunks of part s of the inputs."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    along = tl.arange(0, CHUNK)
    width: tl.constexpr = K * BITS // 8
    x_rows = x_ptr + token.to(tl.int64)[:, None] * K
    is_token, is_row = (token < tokens)[:, None], row < N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=DTYPE)
    per_split: tl.constexpr = (CHUNKS + SPLITS - 1) // SPLITS
    for step in range(0, per_split):
        stored = (tl.program_id(2) * per_split + step) * CHUNK
        place = stored + along
        inside = place < width
        mask = is_token & inside[None, :]
        # A chunk lies in one group, so its product is multiplied by one scale for each output, after the sum.
        group = tl.minimum(stored // STORED, GROUPS - 1)
        # A group of pairs has twice as many columns as bytes.
        column = place + group * STORED if BITS == 4 else place
        x = tl.load(x_rows + column[None, :], mask=mask, other=0.0)
        high = x
        if BITS == 4:
            high = tl.load(x_rows + (column + STORED)[None, :], mask=mask, other=0.0)
        total += _chunk(
            x, high, weight_ptr, scale_ptr, zero_ptr, row, is_row, place, inside, group, width, BITS, BLOCK_ROWS,
            GROUPS, ZERO, BLOCK_N, DTYPE,
        )  # fmt: skip
    if GROUPS == 1:
        total *= tl.load(scale_ptr + row // BLOCK_ROWS, mask=is_row, other=0.0).to(DTYPE)[None, :]
    if BIAS:  # of which one part of the sum gets all
        is_first = tl.program_id(2) == 0
        total += tl.load(bias_ptr + row, mask=is_row & is_first, other=0.0).to(DTYPE)[None, :]
    target = out_ptr + (token.to(tl.int64)[:, None] * SPLITS + tl.program_id(2)) * N + row[None, :]
    tl.store(target, total, mask=is_token & is_row[None, :])


@triton.jit
def _chunk(
    x, high, weight_ptr, scale_ptr, zero_ptr, row, is_row, place, inside, group, width: tl.constexpr,
    BITS: tl.constexpr, BLOCK_ROWS: tl.constexpr, GROUPS: tl.constexpr, ZERO: tl.constexpr, BLOCK_N: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """The product of a chunk; ``high`` are the inputs of the high halves of pairs."""
    numbers = weight_ptr + row.to(tl.int64)[:, None] * width + place[None, :]
    mask = is_row[:, None] & inside[None, :]
    scales = row // BLOCK_ROWS * GROUPS + group
    if BITS == 4:
        low_numbers, high_numbers = unpack_pairs(tl.load(numbers, mask=mask, other=0), x.dtype)
        if ZERO:
            zero = tl.load(zero_ptr + scales, mask=is_row, other=8.0).to(tl.float32)
            shift = (8.0 - zero).to(x.dtype)[:, None]
            low_numbers, high_numbers = _add(low_numbers, shift), _add(high_numbers, shift)
        part = _dot(x, low_numbers, DTYPE) + _dot(high, high_numbers, DTYPE)
    else:
        part = _dot(x, tl.load(numbers, mask=mask, other=0.0).to(tl.float32), DTYPE)
    if GROUPS > 1:
        part *= tl.load(scale_ptr + scales, mask=is_row, other=0.0).to(DTYPE)[None, :]
    return part


@triton.jit
def unpack_pairs(pairs, dtype: tl.constexpr):
    """Two numbers of 4 bits in each byte, minus 8: the low ones and the high ones, in ``dtype``."""
    if INTERPRETED or dtype != tl.bfloat16:
        low = ((pairs & 15).to(tl.float32) - 8.0).to(dtype)
        high = ((pairs >> 4).to(tl.float32) - 8.0).to(dtype)
    else:
        # Four bytes at a time: 0x4300 is 128 in bfloat16, and its last bits count in ones, so 0x4300 + q is 128 + q.
        # Then 136 is subtracted (0xC308 is -136). Converting each number would take six times as many instructions.
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 low, high, one, minus;
            and.b32 low, $4, 0x0F0F0F0F;
            shr.u32 high, $4, 4;
            and.b32 high, high, 0x0F0F0F0F;
            mov.b32 one, 0x3F803F80;
            mov.b32 minus, 0xC308C308;
            prmt.b32 $0, low, 0x43434343, 0x4140;
            prmt.b32 $1, low, 0x43434343, 0x4342;
            prmt.b32 $2, high, 0x43434343, 0x4140;
            prmt.b32 $3, high, 0x43434343, 0x4342;
            fma.rn.bf16x2 $0, $0, one, minus;
            fma.rn.bf16x2 $1, $1, one, minus;
            fma.rn.bf16x2 $2, $2, one, minus;
            fma.rn.bf16x2 $3, $3, one, minus;
            }""",
            "=&r,=&r,=&r,=&r,r",
            [pairs],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    return low, high


@triton.jit
def _add(numbers, shift):
    """Their sum, which is exact."""
    if INTERPRETED:  # which does not know how to add bfloat16
        shift = shift.to(tl.float32)
    return (numbers + shift).to(numbers.dtype)


@triton.jit
def _dot(x, weight, DTYPE: tl.constexpr):
    """``x weightᵀ`` in the dtype of ``x``: [M, K] and [N, K] → [M, N]."""
    if INTERPRETED:  # tl.dot of the interpreter does not know bfloat16
        x = x.to(DTYPE)
    return tl.dot(x, tl.trans(weight.to(x.dtype)), input_precision="ieee", out_dtype=DTYPE)


def dequantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: tuple[int, int],
) -> torch.Tensor:
    """Write the weight out in the dtype of ``x``: [N, K], where K is that of ``x``, [T, K]."""
    layout = quantized_layout(x, weight, scale, block)
    out = torch.empty((len(weight), layout.columns), dtype=x.dtype, device=x.device)
    size = 1024
    _dequantize_kernel[(len(weight), triton.cdiv(weight.shape[1], size))](
        weight,
        scale,
        scale if zero is None else zero,
        out,
        K=layout.columns,
        BITS=layout.bits,
        BLOCK_ROWS=layout.block_rows,
        GROUPS=layout.groups,
        STORED=layout.stored,
        ZERO=zero is not None,
        SIZE=size,
        DTYPE=compute_dtype(x.dtype),
        **pdl_launch_args(weight),
    )
    return out


@triton.jit
def _dequantize_kernel(
    weight_ptr,
    scale_ptr,
    zero_ptr,
    out_ptr,  # [N, K]
    K: tl.constexpr,
    BITS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    STORED: tl.constexpr,
    ZERO: tl.constexpr,
    SIZE: tl.constexpr,
    DTYPE: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (n, b): SIZE stored numbers of row n."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    width: tl.constexpr = K * BITS // 8
    inside = place < width
    group = place // STORED
    at = row // BLOCK_ROWS * GROUPS + group
    scale = tl.load(scale_ptr + at, mask=inside, other=0.0).to(DTYPE)
    if BITS == 4:
        zero = tl.full((SIZE,), 8.0, tl.float32)
        if ZERO:
            zero = tl.load(zero_ptr + at, mask=inside, other=0.0).to(tl.float32)
        numbers = tl.load(weight_ptr + row * width + place, mask=inside, other=0)
        low = out_ptr + row * K + group * STORED + place
        tl.store(low, ((numbers & 15).to(tl.float32) - zero).to(DTYPE) * scale, mask=inside)
        tl.store(low + STORED, ((numbers >> 4).to(tl.float32) - zero).to(DTYPE) * scale, mask=inside)
    else:
        numbers = tl.load(weight_ptr + row * width + place, mask=inside, other=0.0)
        tl.store(out_ptr + row * K + place, numbers.to(tl.float32).to(DTYPE) * scale, mask=inside)


@functools.cache
def _one(device: torch.device) -> torch.Tensor:
    """The scale of a product that is scaled afterwards; kept, since graphs hold its address."""
    return torch.ones((), dtype=torch.float32, device=device)


def scale_product(
    product: torch.Tensor, x_scale: torch.Tensor, weight_scale: torch.Tensor, bias: torch.Tensor | None
) -> None:
    """Multiply [T, N] in place by the scales of its rows, float32[T, 1], and columns, float32[N, 1]; add the bias."""
    tokens, rows = product.shape
    if not tokens:
        return
    size = 1024
    _scale_product_kernel[(tokens, triton.cdiv(rows, size))](
        product,
        x_scale,
        weight_scale,
        product if bias is None else bias,
        N=rows,
        SIZE=size,
        BIAS=bias is not None,
        **pdl_launch_args(product),
    )


@triton.jit
def _scale_product_kernel(
    product_ptr,  # [T, N]
    x_scale_ptr,  # float32[T]
    weight_scale_ptr,  # float32[N]
    bias_ptr,  # [N]
    N: tl.constexpr,
    SIZE: tl.constexpr,
    BIAS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Program (t, b): SIZE outputs of token t."""
    column = tl.program_id(1) * SIZE + tl.arange(0, SIZE)
    inside = column < N
    scale = tl.load(weight_scale_ptr + column, mask=inside, other=0.0)  # no kernel before writes it
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = product_ptr + row * N + column
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) * (scale * tl.load(x_scale_ptr + row))
    if BIAS:
        value += tl.load(bias_ptr + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(place, value.to(product_ptr.dtype.element_ty), mask=inside)


def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Round rows to e4m3, each with its own scale: [T, K] → e4m3[T, K] and float32[T, 1]. Twin: `Fp8.linear`."""
    x = x.contiguous()
    numbers = torch.empty_like(x, dtype=torch.float8_e4m3fn)
    scale = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    if len(x):
        size = triton.next_power_of_2(x.shape[1])
        _quantize_rows_kernel[(len(x),)](
            x,
            numbers,
            scale,
            K=x.shape[1],
            SIZE=size,
            num_warps=min(max(size // 1024, 1), 16),
            **pdl_launch_args(x),
        )
    return numbers, scale


@triton.jit
def _quantize_rows_kernel(x_ptr, numbers_ptr, scale_ptr, K: tl.constexpr, SIZE: tl.constexpr, USE_PDL: tl.constexpr):
    """Program t: row t."""
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE)
    x = tl.load(x_ptr + row * K + column, mask=column < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), axis=0), 1e-12) / 448.0
    tl.store(scale_ptr + row, scale)
    target = numbers_ptr + row * K + column
    tl.store(target, to_kv_dtype(x / scale, numbers_ptr), mask=column < K)
