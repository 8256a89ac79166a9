"""Exchanges the layers of a built model for fused ones."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

from torch import nn

from minisgl.errors import ConfigError
from minisgl.kernels.choice import LAYER_FUSIONS
from minisgl.kernels.launch import check_device
from minisgl.kernels.layers import FusedAttention, FusedExperts, FusedGatedMLP, FusedRMSNorm, NoRotary
from minisgl.layers import Attention, Experts, GatedMLP, RMSNorm
from minisgl.models.decoder import Decoder, DecoderLayer

M = TypeVar("M", bound=nn.Module)


def fuse(model: nn.Module, only: Collection[str] = LAYER_FUSIONS) -> None:
    """Replace the layers of ``model`` in place. Parameters stay the same tensors under the same names.

    Layers of other classes, a subclass of a plain one included, are left as they are.

    Args:
        model: built by `minisgl.models`, its parameters on the device where it will run.
        only: names from `LAYER_FUSIONS`.

    Raises:
        ConfigError: an unknown name, or a device that has no kernels.
    """
    for name in only:
        if name not in LAYER_FUSIONS:
            raise ConfigError(f"only: no fusion is called {name!r}; choose from {', '.join(LAYER_FUSIONS)}")
    check_device(next(model.parameters()).device)
    if "rope" in only:
        for decoder in [module for module in model.modules() if isinstance(module, Decoder)]:
            _fuse_rope(decoder)
    if "norm" in only:
        _replace(model, RMSNorm, FusedRMSNorm)
    if "activation" in only:
        _replace(model, GatedMLP, FusedGatedMLP)
    if "experts" in only:
        _replace(model, Experts, FusedExperts)


def _fuse_rope(decoder: Decoder) -> None:
    rotary = decoder.rotary
    _replace(decoder, Attention, lambda attention: FusedAttention(attention, rotary))
    # A layer of another class may read the rotation that it is handed in a way that cannot be seen from here.
    if all(type(layer) is DecoderLayer for layer in decoder.layers):
        decoder.rotary = NoRotary()


def _replace(model: nn.Module, kind: type[M], make: Callable[[M], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                setattr(parent, name, make(child))
