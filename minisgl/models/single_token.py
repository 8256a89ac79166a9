"""A whole decoder for decode steps with a single token: six kernels a layer."""

from __future__ import annotations

from typing import Any, TypeGuard, cast

import torch
from torch import nn

from minisgl.batch import DeviceBatch
from minisgl.context import KVTensors
from minisgl.kernels.quantized_linear import LEAST_CHUNK
from minisgl.kernels.single_token_attention import SingleTokenAttention
from minisgl.kernels.single_token_linear import linear
from minisgl.kernels.single_token_quantized import quantized_linear
from minisgl.layers.attention import Attention
from minisgl.layers.fused import FusedAllReduceRMSNorm, FusedAttention, FusedGatedMLP, FusedRMSNorm
from minisgl.layers.linear import RowParallelLinear, Weight
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.quantizers import Fp8, Fp8Block, Fp8WeightOnly, Int4, Int4ZeroPoint, Int8
from minisgl.models.decoder import CausalLM, DecoderLayer


class SingleTokenDecoder:
    """Computes a `CausalLM` that it `supports` with other kernels: ``decoder(inputs)`` is ``model(inputs)``.

    Kernels of a layer: 1. norm and QKV projection; 2. QK-norm, rotary embedding, KV store and attention, in parts;
    3. their merge; 4. output projection and residual addition; 5. norm, gate and up projection, SiLU and product;
    6. down projection and residual addition. After 4 and 6, the ranks all-reduce.
    """

    def __init__(self, model: CausalLM, kv_cache: KVTensors) -> None:
        decoder = model.model
        self.model = model
        self._communicator = model.communicator
        self.layers = cast(list[DecoderLayer], list(decoder.layers))
        self.kv_cache = kv_cache
        weight = decoder.norm.weight  # has the model's dtype, whatever is quantised
        first = self.layers[0]
        attention, spec = first.self_attn, first.self_attn.spec
        self.attend = SingleTokenAttention(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, weight.dtype, weight.device
        )
        self._rotaries = [decoder.rotary_of(layer_id).table for layer_id in range(len(self.layers))]
        self._qkv = weight.new_empty(attention.qkv_proj.weight.shape[0])
        self._attended = weight.new_empty(spec.num_heads * spec.head_dim)
        self._hidden = weight.new_empty(cast(GatedMLP, first.mlp).down_proj.in_shard.size)

    @staticmethod
    def supports(model: nn.Module) -> TypeGuard[CausalLM]:
        """Whether all layers are plain, without experts, ``head_dim`` is a power of two from 32 on, and no weight is
        prepacked for the CPU, or quantised by a class that is none of ours or in blocks that the kernels don't know."""
        if not isinstance(model, CausalLM) or model.config.head_dim & (model.config.head_dim - 1):
            return False
        if any(parameter.is_mkldnn for parameter in model.parameters()):
            return False
        if not all(_kernels_know(module) for module in model.modules() if isinstance(module, QuantizedWeight)):
            return False
        if model.config.attention_features or model.config.head_dim < 32:
            return False
        if not all(type(norm) in _NORMS for norm in model.modules() if isinstance(norm, RMSNorm)):
            return False
        return all(
            type(layer) is DecoderLayer
            and type(layer.self_attn) in (Attention, FusedAttention)
            and type(layer.mlp) in (GatedMLP, FusedGatedMLP)
            for layer in model.model.layers
        )

    def __call__(self, inputs: DeviceBatch) -> torch.Tensor:
        """Run a step of one token and return its logits, [1, vocab_size], in the model's dtype."""
        decoder = self.model.model
        stream = self.run_layers(decoder.embed(inputs.input_ids)[0], inputs)
        head = decoder.embed_tokens if self.model.lm_head is None else self.model.lm_head
        logits = stream.new_empty(head.weight.shape[0])
        _multiply(stream, head.weight, logits, norm=decoder.norm.weight, eps=decoder.norm.eps)
        return self.model.finish_logits(head.gather_logits(logits.unsqueeze(0)))

    def run_layers(self, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        """Return the residual stream, [hidden_size], after all layers."""
        for layer in self.layers:
            stream = self._layer(layer, stream, inputs)
        return stream

    def _layer(self, layer: DecoderLayer, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        """Return the residual stream, [hidden_size], after one layer. ``stream`` may be overwritten."""
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        norm = layer.input_layernorm
        qkv = attention.qkv_proj
        _multiply(stream, qkv.weight, self._qkv, bias=qkv.bias, norm=norm.weight, eps=norm.eps)
        spec = attention.spec
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        self.attend(
            self._qkv,
            norms,
            eps,
            self._rotaries[spec.layer_id],
            inputs.slots,
            inputs.seq_lens,
            inputs.table_of(spec.sliding_window),
            *self.kv_cache.layer(spec.layer_id),
            spec.scale,
            spec.sliding_window,
            self._attended,
        )
        stream = self._project_and_add(self._attended, attention.o_proj, stream)
        norm = layer.post_attention_layernorm
        gate_up = mlp.gate_up_proj
        _multiply(stream, gate_up.weight, self._hidden, bias=gate_up.bias, norm=norm.weight, eps=norm.eps, gated=True)
        return self._project_and_add(self._hidden, mlp.down_proj, stream)

    def _project_and_add(self, x: torch.Tensor, projection: RowParallelLinear, stream: torch.Tensor) -> torch.Tensor:
        # Only the first rank has the residual stream and the bias in its part of the sum.
        bias, residual = (projection.bias, stream) if self._communicator.rank == 0 else (None, None)
        _multiply(x, projection.weight, stream, bias=bias, residual=residual)
        return self._communicator.all_reduce(stream)


_NORMS = (RMSNorm, FusedRMSNorm, FusedAllReduceRMSNorm)


# These classes themselves: one derived from them may multiply in another way.
_QUANTIZERS = (Fp8, Fp8Block, Fp8WeightOnly, Int4, Int4ZeroPoint, Int8)


def _kernels_know(weight: QuantizedWeight) -> bool:
    if type(weight.quantizer) not in _QUANTIZERS:
        return False
    scales, bytes_of_row = weight.layout["weight_scale"], weight.tensors["weight"].shape[1]
    stored = scales.columns // 2 if isinstance(weight.quantizer, Int4) else scales.columns
    return bytes_of_row % LEAST_CHUNK == 0 and (stored & -stored >= LEAST_CHUNK or stored == 0)


def _multiply(x: torch.Tensor, weight: Weight, out: torch.Tensor, **fused: Any) -> None:
    """``W x`` into ``out``, with what else the kernels of plain and quantised weights can do."""
    if not isinstance(weight, QuantizedWeight):
        linear(x, weight, out, **fused)
        return
    tensors, scales = weight.tensors, weight.layout["weight_scale"]
    block = (scales.rows, scales.columns)
    zero = tensors.get("weight_zero")
    quantized_linear(x, tensors["weight"], tensors["weight_scale"], zero, block, out, **fused)
