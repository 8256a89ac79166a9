"""Fusions by name, and replacing a model's layers by those of `minisgl.layers.fused`."""

from __future__ import annotations

import os
import shutil
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
from minisgl.layers.quantizers import takes_rounded_rows
from minisgl.layers.rotary import Rotary
from minisgl.layers.sharding import SINGLE_RANK
from minisgl.models.decoder import Decoder, DecoderLayer

LAYER_FUSIONS = ("norm", "rope", "activation", "experts")
"""Residual + RMSNorm; QK-norm + rotary embedding + KV store; SiLU × up; experts as grouped matrix products."""
FUSIONS = (*LAYER_FUSIONS, "single-token", "persistent")
"""Also whole decoders for decode steps with one token: six kernels a layer, and one kernel for all layers where model
and GPU allow. All of these by default on CUDA."""
_NAMES = (*FUSIONS, "compile")

M = TypeVar("M", bound=nn.Module)


def select_fusions(names: Collection[str] | None, device: torch.device) -> tuple[str, ...]:
    """Check ``names`` and return each once. None stands for all of `FUSIONS` with CUDA and Triton, else for none.

    Raises `ConfigError` for an unknown name, or if Triton or, for torch.compile on a CPU, a C++ compiler is missing.
    """
    if names is None:
        return FUSIONS if device.type == "cuda" and has_triton() else ()
    chosen = tuple(dict.fromkeys(names))
    for name in chosen:
        if name not in _NAMES:
            raise ConfigError(f"fusions: unknown name {name!r}; choose from {', '.join(_NAMES)}")
    compiler = os.environ.get("CXX", "g++")
    if "compile" in chosen and device.type == "cpu" and shutil.which(compiler) is None:
        raise ConfigError(f"fusions: 'compile' needs a C++ compiler and there is no {compiler}; install it, or set CXX")
    if (device.type == "cuda" or set(chosen) - {"compile"}) and chosen and not has_triton():
        raise ConfigError("fusions: Triton is not installed; install it (pip install triton) or use fusions=()")
    return chosen


def fuse_layers(model: nn.Module, fusions: Collection[str] = LAYER_FUSIONS) -> None:
    """Replace plain layers of ``model``, but not their subclasses, in place; parameters stay the same tensors.

    The other names replace no layer here. Raises `ConfigError` for an unknown name, or a device that has no kernels.
    """
    for name in fusions:
        if name not in _NAMES:
            raise ConfigError(f"fusions: no fusion is called {name!r}; choose from {', '.join(_NAMES)}")
    if not set(fusions) & set(LAYER_FUSIONS):
        return
    # Imported here because these need Triton, which not every machine has.
    from minisgl.kernels.launch import check_device
    from minisgl.layers.fused import FusedExperts, FusedGatedMLP, FusedRMSNorm

    check_device(next(model.parameters()).device)
    decoders = [module for module in model.modules() if isinstance(module, Decoder)]
    if "rope" in fusions:
        for decoder in decoders:
            _fuse_rope(decoder)
    if "norm" in fusions:
        for decoder in decoders:
            _fuse_norms_with_all_reduce(decoder)
        _replace(model, RMSNorm, FusedRMSNorm)
        for decoder in decoders:
            _round_in_norms(decoder)
    if "activation" in fusions:
        _replace(model, GatedMLP, FusedGatedMLP)
    if "experts" in fusions:
        _replace(model, Experts, FusedExperts)


def compile_layers(model: nn.Module) -> None:
    """Replace the layers of ``model`` that are still plain by those that torch.compile compiles, in place.

    Call it after `fuse_layers`, whose kernels stay.
    """
    from minisgl.layers.compiled import CompiledAttention, CompiledGatedMLP, CompiledRMSNorm

    _replace(model, RMSNorm, CompiledRMSNorm)
    _replace(model, GatedMLP, CompiledGatedMLP)
    _replace(model, Attention, CompiledAttention)


def _fuse_rope(decoder: Decoder) -> None:
    from minisgl.layers.fused import FusedAttention, NoRotary

    for layer_id, layer in enumerate(decoder.layers):
        rotary = decoder.rotary_of(layer_id)
        _replace(layer, Attention, lambda attention, rotary=rotary: FusedAttention(attention, rotary))  # type: ignore[misc]
    # A layer of another class may still read the rotation that it gets.
    if all(type(layer) is DecoderLayer for layer in decoder.layers):
        decoder.rotary = NoRotary(decoder.rotary)
        _replace(decoder.other_rotaries, Rotary, NoRotary)


def _fuse_norms_with_all_reduce(decoder: Decoder) -> None:
    """Move the all-reduce of each row-parallel layer into the norm after it.

    The residual stream is then spread over the ranks, so all layers must be plain ones. The first norm stays.
    """
    layers = [layer for layer in decoder.layers if type(layer) is DecoderLayer]
    if len(layers) < len(decoder.layers) or layers[0].self_attn.o_proj.communicator.size == 1:
        return
    for layer, following in zip(layers, [*layers[1:], None], strict=True):
        layer.post_attention_layernorm = _with_all_reduce(layer.post_attention_layernorm, layer.self_attn.o_proj)
        mlp = layer.mlp.down_proj if isinstance(layer.mlp, GatedMLP) else layer.mlp
        assert isinstance(mlp, RowParallelLinear | MoE), "no other MLP is built by DecoderLayer"
        if following is None:
            decoder.norm = _with_all_reduce(decoder.norm, mlp)
        else:
            following.input_layernorm = _with_all_reduce(following.input_layernorm, mlp)


def _with_all_reduce(norm: RMSNorm, layer_before: RowParallelLinear | MoE) -> RMSNorm:
    from minisgl.layers.fused import FusedAllReduceRMSNorm

    fused = FusedAllReduceRMSNorm(norm, layer_before.communicator)
    layer_before.communicator = SINGLE_RANK
    return fused


def _round_in_norms(decoder: Decoder) -> None:
    """Have norms round where a product that rounds its inputs is all that reads them: in plain layers."""
    from minisgl.layers.fused import FusedRMSNorm

    for layer in decoder.layers:
        if type(layer) is DecoderLayer:
            weights = [(layer.input_layernorm, layer.self_attn.qkv_proj.weight)]
            if isinstance(layer.mlp, GatedMLP):
                weights.append((layer.post_attention_layernorm, layer.mlp.gate_up_proj.weight))
            for norm, weight in weights:
                if isinstance(norm, FusedRMSNorm):
                    norm.rounds = takes_rounded_rows(weight)


def _replace(model: nn.Module, kind: type[M], make: Callable[[M], nn.Module]) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                setattr(parent, name, make(child))
