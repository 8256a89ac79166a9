"""What all kernels share: where they run, in which dtype they compute, how they are launched, how KV is converted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import Event
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime import JITFunction

from minisgl.errors import ConfigError
from minisgl.kernels.interpreter import prepare_once_a_launch

# Whether kernels run in Triton's interpreter, on the CPU: `TRITON_INTERPRET=1` when Triton was first imported.
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
if INTERPRETED.value:
    from triton.runtime import interpreter

    prepare_once_a_launch(interpreter)


def check_device(device: torch.device) -> None:
    """Raise `ConfigError` if ``device`` is not CUDA and Triton's interpreter is off."""
    if device.type != "cuda" and not INTERPRETED:
        raise ConfigError(
            f"device: Triton kernels run on CUDA, not on {device.type!r}; set TRITON_INTERPRET=1 before Triton is "
            "imported to have them interpreted (slowly), or use the plain layers and the sampler 'default'"
        )


def compute_dtype(dtype: torch.dtype) -> tl.dtype:
    """The dtype that a kernel computes in: float64 for float64, float32 for everything narrower."""
    return tl.float64 if dtype == torch.float64 else tl.float32


def _pdl_launch_args() -> dict[str, bool]:
    nvidia = torch.version.cuda is not None and torch.cuda.is_available()
    has_pdl = nvidia and torch.cuda.get_device_capability()[0] >= 9
    return {"USE_PDL": True, "launch_pdl": True} if has_pdl else {"USE_PDL": False}


# Launch arguments for programmatic dependent launch (PDL), which Hopper and later GPUs have: a kernel may start when
# all programs of the preceding one have called `gdc_launch_dependents`, and waits for its results in `gdc_wait`. So the
# end of one kernel overlaps with the start of the next.
PDL_LAUNCH_ARGS = _pdl_launch_args()

# A kernel over more rows hides its start anyway; launched early, it only gets in the way of the one before.
_MAX_PDL_ROWS = 1024


def pdl_launch_args(tensor: torch.Tensor) -> dict[str, bool]:
    """Return `PDL_LAUNCH_ARGS` for a kernel over few rows, ``len(tensor)``, and arguments without PDL for others.

    A kernel of 1 to 2 µs becomes 0.3 to 0.7 µs faster; one over many rows does not. Give a single token as [1, …].
    """
    return PDL_LAUNCH_ARGS if tensor.is_cuda and len(tensor) <= _MAX_PDL_ROWS else {"USE_PDL": False}


@contextmanager
def without_pdl() -> Iterator[None]:
    """Launch and capture all kernels inside the block without PDL, to measure what PDL is worth."""
    saved = dict(PDL_LAUNCH_ARGS)
    PDL_LAUNCH_ARGS.update(dict.fromkeys(PDL_LAUNCH_ARGS, False))
    try:
        yield
    finally:
        PDL_LAUNCH_ARGS.update(saved)


@contextmanager
def compile_only() -> Iterator[None]:
    """Inside the block, launching a Triton kernel runs nothing; at its end all of these are compiled, many at once.

    Compilers release the lock of Python's interpreter for most of their work, so many kernels take little longer than
    the slowest. What a kernel would have written stays what it was: nothing in the block may depend on it.
    """
    run, begin = JITFunction.run, Event()

    def compile_kernel(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(kernel, *args, grid=grid, warmup=True, **kwargs)

    # Threads that began at once would take the lock from the block, which has many short operations, time and again.
    threads = ThreadPoolExecutor(os.cpu_count(), initializer=begin.wait)
    with threads, triton.AsyncCompileMode(threads):
        JITFunction.run = compile_kernel
        try:
            yield
        finally:
            JITFunction.run = run
            begin.set()


# The interpreter's numbers are arrays of one element, which NumPy 2.4 does not accept as an index.
def _interpreted_range(*bounds: Any) -> range:
    return range(*(bound.handle.data.item() if isinstance(bound, tl.tensor) else bound for bound in bounds))


# `range` with bounds that are known only when a kernel runs.
tile_range = _interpreted_range if INTERPRETED.value else tl.range
_FP8_MAX = tl.constexpr(448.0)


@triton.jit
def to_kv_dtype(x: tl.tensor, memory: tl.tensor) -> tl.tensor:
    """Convert ``x`` to the dtype of the KV cache at ``memory``. Twin: `minisgl.kvcache.pool.to_kv_dtype`."""
    if memory.dtype.element_ty == tl.float8e4nv:
        x = tl.minimum(tl.maximum(x.to(tl.float32), -_FP8_MAX), _FP8_MAX)
        if INTERPRETED:  # its own conversion is correct only for numbers that need no rounding
            x = _nearest_fp8(x)
    return x.to(memory.dtype.element_ty)


@triton.jit
def _nearest_fp8(x: tl.tensor) -> tl.tensor:
    """Round ``x`` to three bits of mantissa, or to a multiple of 2⁻⁹ where it is small, for the interpreter.

    Adding a large number and subtracting it again leaves as many bits as the sum has room for.
    """
    large = x * 1048576.0
    coarse = (x + large) - large
    fine = (x + 24576.0) - 24576.0
    return tl.where(tl.abs(x) < 0.015625, fine, coarse)


@triton.jit
def from_kv_dtype(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Convert ``x``, loaded from the KV cache, to the dtype that is computed in."""
    if x.dtype == tl.float8e4nv:  # by way of float32: more instructions than straight to bfloat16, but fast ones
        x = x.to(tl.float32)
    return x.to(dtype)
