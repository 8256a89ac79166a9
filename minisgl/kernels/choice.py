"""Which fused kernels an engine uses, by name."""

from __future__ import annotations

from collections.abc import Collection
from importlib.util import find_spec

import torch
from torch import nn

from minisgl.errors import ConfigError

LAYER_FUSIONS = ("norm", "rope", "activation", "experts")
"""Residual + RMSNorm; QK-norm + rotary embedding + KV store; SiLU·mul; a mixture's experts as grouped products."""
FUSIONS = (*LAYER_FUSIONS, "single-token")
"""Also: all of a decode step with one token."""


def has_triton() -> bool:
    """Whether Triton is installed, as it is with every CUDA build of PyTorch on Linux."""
    return find_spec("triton") is not None


def choose_fusions(names: Collection[str] | None, device: torch.device) -> tuple[str, ...]:
    """Return the fusions called ``names``, each once.

    Args:
        names: from `FUSIONS`; None is all of them where there are CUDA and Triton, and none elsewhere.
        device: of the engine.

    Raises:
        ConfigError: an unknown name, or Triton is missing.
    """
    if names is None:
        return FUSIONS if device.type == "cuda" and has_triton() else ()
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in FUSIONS:
            raise ConfigError(f"fusions: unknown name {name!r}; choose from {', '.join(FUSIONS)}")
    if chosen and not has_triton():
        raise ConfigError("fusions: Triton is not installed; install it (pip install triton) or use fusions=()")
    return chosen


def apply_fusions(names: Collection[str], model: nn.Module) -> None:
    """Exchange layers of ``model`` for the fused ones among ``names``. See `minisgl.kernels.fuse`."""
    layers = set(names) & set(LAYER_FUSIONS)
    if layers:
        from minisgl.kernels.fuse import fuse

        fuse(model, layers)


def choose_sampler(name: str, device: torch.device) -> str:
    """Registered name of the sampler called ``name``; ``"auto"`` is the fastest on ``device``."""
    if name != "auto":
        return name
    return "triton" if device.type == "cuda" and has_triton() else "default"
