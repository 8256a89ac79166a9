"""Fused kernels by name, and the exchange of a built model's layers for layers that use them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TypeVar

import torch
from torch import nn

from minisgl.errors import ConfigError
from minisgl.kernels import has_triton
from minisgl.layers.attention import Attention
from minisgl.layers.linear import RowParallelLinear
from minisgl.layers.mlp import Experts, GatedMLP, MoE
from minisgl.layers.norm import RMSNorm
from minisgl.layers.sharding import SINGLE_RANK
from minisgl.models.decoder import Decoder, DecoderLayer

LAYER_FUSIONS = ("norm", "rope", "activation", "experts")
"""Residual + RMSNorm; QK-norm + rotary embedding + KV store; SiLU·mul; a mixture's experts as grouped products."""
FUSIONS = (*LAYER_FUSIONS, "single-token")
"""Also: all of a decode step with one token."""

M = TypeVar("M", bound=nn.Module)


def select_fusions(names: Collection[str] | None, device: torch.device) -> tuple[str, ...]:
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


def fuse_layers(model: nn.Module, fusions: Collection[str] = LAYER_FUSIONS) -> None:
    """Replace the layers of ``model`` in place. Parameters stay the same tensors under the same names.

    Layers of other classes, a subclass of a plain one included, are left as they are.

    Args:
        model: built by `minisgl.models`, its parameters on the device where it will run.
        fusions: names from `FUSIONS`; ``"single-token"`` exchanges no layer.

    Raises:
        ConfigError: an unknown name, or a device that has no kernels.
    """
    for name in fusions:
        if name not in FUSIONS:
            raise ConfigError(f"fusions: no fusion is called {name!r}; choose from {', '.join(FUSIONS)}")
    if not set(fusions) & set(LAYER_FUSIONS):
        return
    # Here and not above: these import Triton, which not every machine has.
    from minisgl.kernels.launch import check_device
    from minisgl.layers.fused import FusedExperts, FusedGatedMLP, FusedRMSNorm

    check_device(next(model.parameters()).device)
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    if "rope" in fusions:
        for decoder in decoders:
            _fuse_rope(decoder)
    if "norm" in fusions:
        for decoder in decoders:
            _fuse_all_reduce(decoder)
        _replace(model, RMSNorm, FusedRMSNorm)
    if "activation" in fusions:
        _replace(model, GatedMLP, FusedGatedMLP)
    if "experts" in fusions:
        _replace(model, Experts, FusedExperts)


def _fuse_rope(decoder: Decoder) -> None:
    from minisgl.layers.fused import FusedAttention, NoRotary

    rotary = decoder.rotary
    _replace(decoder, Attention, lambda attention: FusedAttention(attention, rotary))
    # A layer of another class may read the rotation that it is handed in a way that cannot be seen from here.
    if all(type(layer) is DecoderLayer for layer in decoder.layers):
        decoder.rotary = NoRotary(rotary)


def _fuse_all_reduce(decoder: Decoder) -> None:
    """Let the norms behind row-parallel products take the sum over the ranks upon themselves.

    A decoder of a single rank, or with layers of another class, is left as it is: what such layers do with the residual
    stream, which is then spread over the ranks, cannot be seen from here. The first norm stands behind the embedding,
    and stays.
    """
    layers = [layer for layer in decoder.layers if type(layer) is DecoderLayer]
    if len(layers) < len(decoder.layers) or layers[0].self_attn.o_proj.communicator.size == 1:
        return
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        layer.post_attention_layernorm = _joined(layer.self_attn.o_proj, layer.post_attention_layernorm)
        product = layer.mlp.down_proj if isinstance(layer.mlp, GatedMLP) else layer.mlp
        assert isinstance(product, RowParallelLinear | MoE), "no other MLP is built by DecoderLayer"
        if following is None:
            decoder.norm = _joined(product, decoder.norm)
        else:
            following.input_layernorm = _joined(product, following.input_layernorm)


def _joined(product: RowParallelLinear | MoE, norm: RMSNorm) -> RMSNorm:
    from minisgl.layers.fused import FusedAllReduceRMSNorm

    reducing = FusedAllReduceRMSNorm(norm, product.communicator)
    product.communicator = SINGLE_RANK
    return reducing


def _replace(model: nn.Module, kind: type[M], make: Callable[[M], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                setattr(parent, name, make(child))
