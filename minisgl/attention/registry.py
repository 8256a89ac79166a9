"""Attention backends by name."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.core.attention import AttentionBackend
from minisgl.core.registry import Registry
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.torch_attention import TorchAttention

AttentionFactory = Callable[[KVCache], AttentionBackend]

ATTENTION_BACKENDS: Registry[AttentionFactory] = Registry("attention_backend")
ATTENTION_BACKENDS.register("torch")(TorchAttention)


def choose_backend(name: str, device: torch.device) -> AttentionFactory:
    """The backend called ``name``; ``"auto"`` is the fastest that runs on ``device``.

    Raises:
        ConfigError: no such backend.
    """
    best = {"cpu": "torch", "cuda": "torch"}
    return ATTENTION_BACKENDS.get(best[device.type] if name == "auto" else name)
