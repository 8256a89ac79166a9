"""Fused kernels: each does in one pass over memory what the layers do in several.

They are functions on tensors. Each replaces plain PyTorch code, its *twin*, and is tested against it. The modules that
hold kernels import Triton; this package itself can be imported without it.
"""

from importlib.util import find_spec

__all__ = ["has_triton"]


def has_triton() -> bool:
    """Whether Triton is installed, as with every CUDA build of PyTorch on Linux."""
    return find_spec("triton") is not None
