"""Products of few tokens with quantised weights, in CUDA C++ on tensor cores.

Reading the weight decides how long such a product takes, if few instructions are spent on each of its numbers. Tensor
cores multiply 16 rows of it with 8 tokens as fast as with one. The kernel is few_tokens.cu; its twin in Triton, which
runs wherever Triton does and knows every scheme, is `minisgl.kernels.quantized_linear`.
"""

from __future__ import annotations

from functools import cache

import torch

from minisgl.kernels.launch import PDL_LAUNCH_ARGS
from minisgl.kernels.nvrtc import CudaKernel, has_nvrtc, source_of

MOST_TOKENS = 8
_WARPS = 8
_TILE = 16  # rows that a warp multiplies at once
_SEGMENT = 64  # bytes of a row that it reads at once
_MANY_ROWS = 6144  # from which on a block has two tiles
_BITS = {torch.float8_e4m3fn: 8, torch.uint8: 4}
_CAPABILITY = (8, 0)  # tensor cores that know bfloat16


def fits(x: torch.Tensor, weight: torch.Tensor, block: tuple[int, int]) -> bool:
    """Whether `linear` can multiply these; ``block``: the (rows, columns) that share a scale; 0 are all columns."""
    bits, columns = _BITS.get(weight.dtype), x.shape[-1]
    if bits is None or not x.is_cuda or x.dtype != torch.bfloat16 or not 0 < x.numel() // columns <= MOST_TOKENS:
        return False
    whole = columns * bits // 8 % _SEGMENT == 0 and len(weight) % _TILE == 0
    # A segment has one scale for each row.
    grouped = block[1] == 0 or (block[1] * bits // 8 % _SEGMENT == 0 and columns % block[1] == 0)
    return whole and grouped and torch.cuda.get_device_capability(x.device) >= _CAPABILITY and has_nvrtc()


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero: torch.Tensor | None,
    block: tuple[int, int],
    out: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """Write ``x Wᵀ + b`` to ``out``, [T, N] or [N].

    Args:
        x: bfloat16[T, K] or [K], contiguous, T at most `MOST_TOKENS`, and what else `fits` asks for.
        weight: as in `minisgl.kernels.single_token_quantized.quantized_linear`, as are ``scale``, ``zero``, ``block``.
    """
    columns, rows = x.shape[-1], out.shape[-1]
    tokens = x.numel() // columns
    tiles = 2 if rows >= _MANY_ROWS and rows % (2 * _TILE) == 0 else 1
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
        BIAS=int(bias is not None),
        TOKENS=tokens,
        TILES=tiles,
        DEPTH=4 // tiles,
        RESIDENT=3 if tokens == 1 and zero is None else 2,
        EARLY=int(early),
    )
    arguments: list[torch.Tensor | int | float] = [
        x,
        weight,
        scale,
        scale if zero is None else zero,
        x if bias is None else bias,
        out,
    ]
    kernel.launch(rows // (_TILE * tiles), arguments, early)


@cache
def _compile(device: int, **constants: int) -> CudaKernel:
    source = source_of("quantized", "few_tokens")
    return CudaKernel(source, "few_tokens", constants, 32 * _WARPS, shared_memory=0)
