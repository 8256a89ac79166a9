"""SiLU·mul in one pass over memory. Its twin is `minisgl.layers.silu_and_mul`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args, wide


@triton.jit
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program a row and BLOCK columns: ``out = gate × sigmoid(gate) × up``.

    gate_up: [T, 2 × SIZE] with any row stride, gate in the first half. out: [T, SIZE], contiguous.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists = columns < SIZE
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    gate = tl.load(gate_up_ptr + row * row_stride + columns, mask=exists, other=0.0).to(WIDE)
    up = tl.load(gate_up_ptr + row * row_stride + SIZE + columns, mask=exists, other=0.0).to(WIDE)
    tl.store(out_ptr + row * SIZE + columns, gate / (1.0 + tl.exp(-gate)) * up, mask=exists)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """``silu(gate) × up``, [T, 2 × n] with each row contiguous → [T, n]."""
    rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((rows, size), dtype=gate_up.dtype, device=gate_up.device)
    block = min(triton.next_power_of_2(size), 1024)
    _silu_and_mul_kernel[(rows, triton.cdiv(size, block))](
        gate_up,
        out,
        gate_up.stride(0),
        SIZE=size,
        BLOCK=block,
        WIDE=wide(gate_up.dtype),
        **pdl_launch_args(gate_up),
    )
    return out
