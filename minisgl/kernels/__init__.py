"""Fused kernels: each does in one pass over memory what the layers do in several.

Each is a function on tensors that replaces plain PyTorch code, its *twin*, and is tested against it. The modules that
hold kernels import Triton; this package itself does not.
"""

from importlib.util import find_spec

__all__ = ["has_triton"]


def has_triton() -> bool:
    """Whether Triton is installed, as with every CUDA build of PyTorch on Linux."""
    return find_spec("triton") is not None
