"""Whether FlashInfer can be used here, found out without importing it."""

from __future__ import annotations

from importlib.util import find_spec

import torch

from minisgl.kvcache.kv_cache import KVCache

_DTYPES = (torch.float16, torch.bfloat16)
_HEAD_DIMS = (64, 128, 256)
_CAPABILITY = (8, 0)


def flashinfer_obstacle(kv_cache: KVCache) -> str | None:
    """What keeps FlashInfer from attending over ``kv_cache``, as half a sentence; None if nothing does."""
    device, dtype, head_dim = kv_cache.k.device, kv_cache.k.dtype, kv_cache.k.shape[-1]
    if device.type != "cuda":
        return f"it needs an NVIDIA GPU and the device is {device.type!r}"
    if torch.cuda.get_device_capability(device) < _CAPABILITY:
        return f"it needs a GPU of compute capability {_CAPABILITY[0]}.{_CAPABILITY[1]} or later"
    if dtype not in _DTYPES:
        return f"it computes float16 and bfloat16 and the KV cache is {str(dtype).removeprefix('torch.')}"
    if head_dim not in _HEAD_DIMS:
        return f"it has kernels for heads of 64, 128 and 256 and the model's have {head_dim}"
    if find_spec("flashinfer") is None:
        return "it is not installed (pip install 'minisgl[cuda]')"
    return None
