"""What all kernels share: where they run, how wide they compute, when they start, and how KV is stored."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import triton
import triton.language as tl

from minisgl.errors import ConfigError

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
"""Whether kernels run in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1`` when Triton was first imported."""


def _pdl_launch_args() -> dict[str, bool]:
    nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    has_pdl = nvidia and torch.cuda.get_device_capability()[0] >= 9
    return {"USE_PDL": True, "launch_pdl": True} if has_pdl else {"USE_PDL": False}


PDL_LAUNCH_ARGS = _pdl_launch_args()
"""Keyword arguments of a launch for programmatic dependent launch (PDL), which Hopper and later GPUs have: a kernel may
start when all programs of the one before have said ``gdc_launch_dependents``, and waits for its results at
``gdc_wait``. So the end of one overlaps with the start of the next."""


_MOST_PDL_ROWS = 1024
"""Longer kernels hide how they start; launched early, they only get into the way of the one before."""


_LARGEST_FP8 = tl.constexpr(448.0)


def check_device(device: torch.device) -> None:
    """Refuse a device that kernels cannot run on.

    Raises:
        ConfigError: ``device`` is not CUDA, and Triton does not interpret.
    """
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            f"device: Triton kernels run on CUDA, not on {device.type!r}; set TRITON_INTERPRET=1 before Triton is "
            "imported to have them interpreted (slowly), or use the plain layers and the sampler 'default'"
        )


def wide(dtype: torch.dtype) -> tl.dtype:
    """What a kernel computes in: float64 for float64, float32 for everything narrower."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def pdl_launch_args(tensor: torch.Tensor) -> dict[str, bool]:
    """`PDL_LAUNCH_ARGS` for a kernel over few rows, for which an early start pays; for others, arguments without PDL.

    A kernel of one or two microseconds gets 0.3 to 0.7 of them back, one over many tokens none: until ``gdc_wait`` it
    can fetch what does not depend on the kernel before, such as weights.

    Args:
        tensor: [T, …] that the kernel reads; the vector of a single token is [1, …].
    """
    return PDL_LAUNCH_ARGS if tensor.is_cuda and len(tensor) <= _MOST_PDL_ROWS else {"USE_PDL": False}


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launch and capture all kernels inside the block without PDL, to see what PDL buys."""
    saved = dict(PDL_LAUNCH_ARGS)
    PDL_LAUNCH_ARGS.update(dict.fromkeys(PDL_LAUNCH_ARGS, False))
    try:
        yield
    finally:
        PDL_LAUNCH_ARGS.update(saved)


def _interpreted_range(*bounds: Any) -> range:
    """`range` for the interpreter, whose numbers are arrays of one element, which NumPy 2.4 takes for no index."""
    return range(*(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds))


tile_range = _interpreted_range if INTERPRETED.value else tl.range
"""`range` with bounds that are known only when a kernel runs."""


@triton.jit
def to_kv_dtype(x: tl.tensor, memory: tl.tensor) -> tl.tensor:
    """``x`` in the dtype of ``memory``, a pointer into the KV cache. The twin is
    `minisgl.kvcache.pool.to_kv_dtype`."""
    if memory.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -_LARGEST_FP8), _LARGEST_FP8)
        if INTERPRETED:
            x = _nearest_fp8(x)
    return x.to(memory.dtype.element_ty)


@triton.jit
def _nearest_fp8(x: tl.tensor) -> tl.tensor:
    """``x`` with three bits of mantissa, or as a multiple of 2⁻⁹: the interpreter converts correctly only numbers that
    need no rounding. Adding a large number and taking it away again leaves as many bits as the sum has room for."""
    large = x * 1048576.0
    coarse = (x + large) - large
    fine = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, fine, coarse)


@triton.jit
def from_kv_dtype(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """``x``, loaded from the KV cache, in the dtype that is computed in. Eight bits go by way of float32: that takes
    more instructions than the direct way to bfloat16, and fast ones."""
    if x.dtype == tl.float8e4nv:
        x = x.to(tl.float32)
    return x.to(dtype)
