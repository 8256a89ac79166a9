"""A decoder for decode steps with a single token, whose layers are one kernel."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import nn

from minisgl.batch import DeviceBatch
from minisgl.context import KVTensors
from minisgl.kernels.persistent_decoder import WIDEST, PersistentLayers, PersistentShape
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.quantization import QuantizedWeight
from minisgl.models.decoder import CausalLM, DecoderLayer
from minisgl.models.single_token import SingleTokenDecoder

_CPU_PROGRAMS = 8


class PersistentDecoder(SingleTokenDecoder):
    """As `SingleTokenDecoder`, with one launch for all layers.

    Args:
        model: one that it `supports`; its weights must stay where they are.
        kv_cache: the same.
        programs: of the kernel; 0 is one for each multiprocessor of the GPU.
    """

    def __init__(self, model: CausalLM, kv_cache: KVTensors, programs: int = 0) -> None:
        super().__init__(model, kv_cache)
        first, weight = self.layers[0], model.model.norm.weight
        spec, mlp = first.self_attn.spec, cast(GatedMLP, first.mlp)
        if programs == 0 and weight.is_cuda:
            programs = torch.cuda.get_device_properties(weight.device).multi_processor_count
        shape = PersistentShape(
            hidden=model.config.hidden_size,
            intermediate=mlp.down_proj.in_shard.size,
            kv_heads=spec.num_kv_heads,
            group=spec.num_heads // spec.num_kv_heads,
            head_dim=spec.head_dim,
            page_size=kv_cache.k.shape[2],
            window=spec.sliding_window or 0,
            qk_norm=first.self_attn.q_norm is not None,
            qkv_bias=first.self_attn.qkv_proj.bias is not None,
        )
        addresses = [self._addresses(layer) for layer in self.layers]
        programs = max(programs or _CPU_PROGRAMS, spec.num_kv_heads)
        self.persistent = PersistentLayers(shape, addresses, programs, weight.dtype, weight.device)

    @staticmethod
    def supports(model: nn.Module) -> TypeGuard[CausalLM]:
        """Whether `SingleTokenDecoder` does, on one rank, no weight is quantised, vectors are at most `WIDEST`, layers
        differ in weights and angles alone, and have no bias but that of queries, keys and values."""
        if not SingleTokenDecoder.supports(model) or model.communicator.size > 1:
            return False
        if any(isinstance(module, QuantizedWeight) for module in model.modules()):
            return False
        layers = cast(list[DecoderLayer], list(model.model.layers))
        first, mlp = layers[0].self_attn.spec, cast(GatedMLP, layers[0].mlp)
        widths = (model.config.hidden_size, first.num_heads * first.head_dim, mlp.down_proj.in_shard.size)
        return max(widths) <= WIDEST and all(
            layer.self_attn.spec.sliding_window == first.sliding_window
            and layer.self_attn.o_proj.bias is None
            and cast(GatedMLP, layer.mlp).gate_up_proj.bias is None
            and cast(GatedMLP, layer.mlp).down_proj.bias is None
            for layer in layers
        )

    def run_layers(self, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        self.persistent.stream.copy_(stream)
        self.run_instructions(inputs, 0, self.persistent.count)
        return self.persistent.stream

    def run_instructions(self, inputs: DeviceBatch, begin: int, end: int, times: torch.Tensor | None = None) -> None:
        """Carry out some instructions of the list; as `PersistentLayers.run`."""
        first = self.layers[0]
        attention, eps = first.self_attn, first.input_layernorm.eps
        head_eps = eps if attention.q_norm is None else attention.q_norm.eps
        self.persistent.run(
            inputs.slots, inputs.seq_lens, inputs.page_table, attention.spec.scale, eps, head_eps, begin, end, times
        )

    def _addresses(self, layer: DecoderLayer) -> list[torch.Tensor | None]:
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        layer_id = attention.spec.layer_id
        q_norm, k_norm = attention.q_norm, attention.k_norm
        return [
            cast(torch.Tensor, attention.qkv_proj.weight),
            attention.qkv_proj.bias,
            cast(torch.Tensor, attention.o_proj.weight),
            cast(torch.Tensor, mlp.gate_up_proj.weight),
            cast(torch.Tensor, mlp.down_proj.weight),
            layer.input_layernorm.weight,
            layer.post_attention_layernorm.weight,
            None if q_norm is None else q_norm.weight,
            None if k_norm is None else k_norm.weight,
            self._rotaries[layer_id],
            self.kv_cache.k[layer_id],
            self.kv_cache.v[layer_id],
        ]
