"""What all kernels need to know before they are launched: where they run, and how wide they compute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import triton
import triton.language as tl

from minisgl.attention.triton_tiles import EARLY
from minisgl.errors import ConfigError

INTERPRETED: bool = triton.knobs.runtime.interpret
"""Whether kernels run in Triton's interpreter, on the CPU: ``TRITON_INTERPRET=1`` when Triton was first imported."""


_MOST_ROWS = 1024
"""Longer kernels hide how they start; launched early, they only get into the way of the one before."""


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


def launch_early(tensor: torch.Tensor) -> dict[str, bool]:
    """Keyword arguments of a launch for programmatic dependent launch, where the GPU has it.

    Normally a kernel starts when the one before it has ended. With this, its programs are put in place while the last
    programs of the one before still run; they fetch what does not depend on it, such as weights, and then wait for its
    results at ``gdc_wait``. A kernel of one or two microseconds gets 0.3 to 0.7 of them back, one over many tokens
    none.

    Args:
        tensor: [T, …] that the kernel reads; the vector of a single token is [1, …].
    """
    return EARLY if tensor.is_cuda and len(tensor) <= _MOST_ROWS else {"EARLY": False}


@contextmanager
def launched_in_turn() -> Iterator[None]:
    """No kernel that is launched or recorded inside the block is launched early: to see what that buys."""
    early = dict(EARLY)
    EARLY.update(dict.fromkeys(EARLY, False))
    try:
        yield
    finally:
        EARLY.update(early)
