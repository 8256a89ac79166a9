"""A decoder for decode steps with a single token, whose layers are one kernel."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import nn

from minisgl.batch import DeviceBatch
from minisgl.context import KVTensors
from minisgl.kernels.nvrtc import has_nvrtc
from minisgl.kernels.persistent_decoder import (
    Interpreter,
    LayerTensors,
    PersistentKernel,
    PersistentShape,
    TokenStep,
    most_programs,
)
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.quantization import QuantizedWeight
from minisgl.models.decoder import CausalLM, DecoderLayer
from minisgl.models.single_token import SingleTokenDecoder


class PersistentDecoder(SingleTokenDecoder):
    """As `SingleTokenDecoder`, with one launch for all layers, or with their `Interpreter` on a CPU.

    Args:
        model: one that it `supports`; its weights must stay where they are.
        kv_cache: the same.
        programs: of the interpreter, which then works on a GPU too; None takes the kernel there, with as many as fit.
    """

    def __init__(self, model: CausalLM, kv_cache: KVTensors, programs: int | None = None) -> None:
        super().__init__(model, kv_cache)
        shape = _shape(model, kv_cache.k.shape[2])
        tensors = [self._tensors(layer) for layer in self.layers]
        kernel = model.model.norm.weight.is_cuda and programs is None
        self.persistent = PersistentKernel(shape, tensors) if kernel else Interpreter(shape, tensors, programs or 8)

    @staticmethod
    def supports(model: nn.Module) -> TypeGuard[CausalLM]:
        """Whether `SingleTokenDecoder` does, on one rank, no weight is quantised, and layers differ in weights and
        angles alone, and have no bias but that of queries, keys and values. On a GPU the model must be in bfloat16, as
        keys and values must, and `cuda.bindings` there; its architecture must be Hopper's or newer, with room for the
        model's vectors in shared memory and for a cluster of blocks for each KV head."""
        if not SingleTokenDecoder.supports(model) or model.communicator.size > 1:
            return False
        if any(isinstance(module, QuantizedWeight) for module in model.modules()):
            return False
        layers = cast(list[DecoderLayer], list(model.model.layers))
        window = layers[0].self_attn.spec.sliding_window
        alike = all(
            layer.self_attn.spec.sliding_window == window
            and layer.self_attn.o_proj.bias is None
            and cast(GatedMLP, layer.mlp).gate_up_proj.bias is None
            and cast(GatedMLP, layer.mlp).down_proj.bias is None
            for layer in layers
        )
        return alike and (not model.model.norm.weight.is_cuda or _has_kernel(model))

    def run_layers(self, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        self.persistent.stream.copy_(stream)
        self.persistent.run(self.token_step(inputs))
        return self.persistent.stream

    def token_step(self, inputs: DeviceBatch) -> TokenStep:
        """What the layers read of a step."""
        first = self.layers[0]
        attention, eps = first.self_attn, first.input_layernorm.eps
        head_eps = eps if attention.q_norm is None else attention.q_norm.eps
        return TokenStep(inputs.slots, inputs.seq_lens, inputs.page_table, attention.spec.scale, eps, head_eps)

    def _tensors(self, layer: DecoderLayer) -> LayerTensors:
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        layer_id = attention.spec.layer_id
        q_norm, k_norm = attention.q_norm, attention.k_norm
        k_cache, v_cache = self.kv_cache.layer(layer_id)
        return LayerTensors(
            qkv=cast(torch.Tensor, attention.qkv_proj.weight),
            qkv_bias=attention.qkv_proj.bias,
            o=cast(torch.Tensor, attention.o_proj.weight),
            gate_up=cast(torch.Tensor, mlp.gate_up_proj.weight),
            down=cast(torch.Tensor, mlp.down_proj.weight),
            input_norm=layer.input_layernorm.weight,
            post_norm=layer.post_attention_layernorm.weight,
            q_norm=None if q_norm is None else q_norm.weight,
            k_norm=None if k_norm is None else k_norm.weight,
            cos_sin=self._rotaries[layer_id],
            k_cache=k_cache,
            v_cache=v_cache,
        )


def _has_kernel(model: CausalLM) -> bool:
    weight = model.model.norm.weight
    if weight.dtype != torch.bfloat16 or not has_nvrtc():
        return False
    if torch.cuda.get_device_capability(weight.device) < (9, 0):
        return False
    return _shape(model, page_size=1).fits(most_programs(weight.device.index))


def _shape(model: CausalLM, page_size: int) -> PersistentShape:
    first = cast(DecoderLayer, model.model.layers[0])
    spec = first.self_attn.spec
    return PersistentShape(
        layers=len(model.model.layers),
        hidden=model.config.hidden_size,
        intermediate=cast(GatedMLP, first.mlp).down_proj.in_shard.size,
        kv_heads=spec.num_kv_heads,
        group=spec.num_heads // spec.num_kv_heads,
        head_dim=spec.head_dim,
        page_size=page_size,
        window=spec.sliding_window or 0,
        qk_norm=first.self_attn.q_norm is not None,
        qkv_bias=first.self_attn.qkv_proj.bias is not None,
    )
