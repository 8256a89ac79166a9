"""Kernels that do in one pass over memory what the layers do in several: functions on tensors, and nothing else.

Each has a plain PyTorch twin, the code that it replaces, and is tested against it. Triton is imported by the modules
that hold kernels and by nothing else, so that this package can be imported where there is no Triton.
"""

from importlib.util import find_spec

__all__ = ["has_triton"]


def has_triton() -> bool:
    """Whether Triton is installed, as it is with every CUDA build of PyTorch on Linux."""
    return find_spec("triton") is not None
