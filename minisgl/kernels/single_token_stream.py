"""Multiply one token with a quantised weight, in CUDA C++, so that memory is always busy.

Half or a quarter of the bytes arrive in half or a quarter of the time, and then all that isn't reading counts: a block
that starts and asks for its first bytes, one that ends and has none left to ask for, and every instruction spent on a
number. The kernel is single_token_stream.cu. Its twin in Triton, which runs wherever Triton does and knows every
scheme, is in `minisgl.kernels.single_token_quantized`; `minisgl.kernels.few_tokens` multiplies up to eight tokens.
"""

from __future__ import annotations

from functools import cache

import torch

from minisgl.kernels.launch import PDL_LAUNCH_ARGS
from minisgl.kernels.nvrtc import CudaKernel, has_nvrtc, source_of

# Measured on an H200: one block on each multiprocessor, with all the threads that it may have.
_WARPS = 32
_DEPTH = 2  # pieces that a warp has on their way
_PIECE, _GROUP = 128, 128  # bytes of a row; columns that may have a scale of their own
_UNIT = 8  # rows
# What a block may have in shared memory on every GPU that knows e4m3, 99 KB, is enough for x and these sums.
_MOST_UNITS = 40
_MOST_COLUMNS = 28672
_BITS = {torch.float8_e4m3fn: 8, torch.uint8: 4}
_CAPABILITY = (8, 9)  # knows e4m3


def fits(x: torch.Tensor, weight: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether `linear` can multiply these; ``block``: the (rows, columns) that share a scale; 0 are all columns."""
    bits, columns = _BITS.get(weight.dtype), x.shape[-1]
    if bits is None or not x.is_cuda or x.dtype != torch.bfloat16 or x.numel() != columns:
        return False
    whole = columns * bits // 8 % _PIECE == 0 and len(weight) % _UNIT == 0
    grouped = (block[1] or columns) % _GROUP == 0 and columns % (block[1] or columns) == 0
    room = columns <= _MOST_COLUMNS
    return whole and grouped and room and torch.cuda.get_device_capability(x.device) >= _CAPABILITY and has_nvrtc()


def linear(
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
    """Write ``W x + b`` to ``out``, [N], fused as in `minisgl.kernels.single_token_linear.linear`.

    With 4 bits x is rounded to integers of 15 bits, each 256 columns with a scale of their own, a power of two.

    Args:
        x: bfloat16[K], contiguous, and what else `fits` asks for.
        weight: as in `minisgl.kernels.single_token_quantized.quantized_linear`, as are ``scale``, ``zero``, ``block``.
    """
    columns, rows = x.shape[-1], out.shape[-1]
    units = rows // (_UNIT // 2 if gated else _UNIT)
    multiprocessors = _multiprocessors(x.device)
    turns = -(-units // (multiprocessors * _MOST_UNITS))
    blocks = min(multiprocessors * turns, units)
    of_block = -(-units // blocks)
    pieces = columns * _BITS[weight.dtype] // 8 // _PIECE
    shared = columns * 2 + pieces * 12 + of_block * _WARPS * _UNIT * 4 + _WARPS * 4
    early = PDL_LAUNCH_ARGS["USE_PDL"]
    kernel = _compile(
        x.device.index,
        ROWS=rows,
        COLUMNS=columns,
        BITS=_BITS[weight.dtype],
        GROUP=block[1] or columns,
        SCALE_ROWS=block[0],
        FLOAT_SCALES=int(scale.dtype == torch.float32),
        ZERO=int(zero is not None),
        NORM=int(norm is not None),
        BIAS=int(bias is not None),
        GATED=int(gated),
        ADD=int(residual is not None),
        UNITS=of_block,
        WARPS=_WARPS,
        DEPTH=_DEPTH,
        EARLY=int(early),
        SHARED=-(-shared // 16) * 16,
    )
    arguments: list[torch.Tensor | int | float] = [
        x,
        x if norm is None else norm,
        weight,
        scale,
        scale if zero is None else zero,
        x if bias is None else bias,
        x if residual is None else residual,
        out,
        eps,
    ]
    kernel.launch(blocks, arguments, early)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _compile(device: int, **constants: int) -> CudaKernel:
    source = source_of("quantized", "single_token_stream")
    threads, shared = 32 * constants["WARPS"], constants["SHARED"]
    return CudaKernel(source, "single_token_stream", constants, threads, shared)
