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


def choose_fusions(names: str, device: torch.device) -> tuple[str, ...]:
    """The fusions called ``names``.

    Args:
        names: ``"auto"``, which is all of them where there are CUDA and Triton and none elsewhere; ``"none"``; or names
            from `FUSIONS`, separated by commas.
        device: of the engine.

    Raises:
        ConfigError: an unknown name, or Triton is missing.
    """
    if names == "auto":
        return FUSIONS if device.type == "cuda" and has_triton() else ()
    if names == "none":
        return ()
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in chosen:
        if name not in FUSIONS:
            raise ConfigError(f"fusions: {name!r} is none of auto, none, {', '.join(FUSIONS)}")
    if not has_triton():
        raise ConfigError("fusions: Triton is not installed; install it (pip install triton) or use fusions='none'")
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
