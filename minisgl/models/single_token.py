"""A whole decoder for steps with a single token: six kernels a layer."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
from torch import nn

from minisgl.batch import DeviceBatch
from minisgl.context import KVTensors
from minisgl.kernels.single_token_attention import SingleTokenAttention
from minisgl.kernels.single_token_linear import linear
from minisgl.layers.linear import RowParallelLinear
from minisgl.layers.mlp import GatedMLP
from minisgl.models.decoder import CausalLM, DecoderLayer


class SingleTokenDecoder:
    """The weights of a `CausalLM`, in other kernels: ``decoder(inputs)`` is ``model(inputs)`` for one decode row.

    1. norm and QKV projection; 2. QK-norm, rotary embedding, KV store and attention, in parts; 3. their merge;
    4. output projection and residual addition; 5. norm, gate and up projection, SiLU and product; 6. down projection
    and residual addition. Ranks that share the model add up their results of 4 and of 6.

    Args:
        model: one that `supports` says yes to.
        kv_cache: keys and values.
    """

    def __init__(self, model: CausalLM, kv_cache: KVTensors) -> None:
        decoder = model.model
        self.model = model
        self._ranks = model.communicator
        self.layers = cast(list[DecoderLayer], list(decoder.layers))
        self.kv_cache = kv_cache
        weight = decoder.embed_tokens.weight
        first = self.layers[0]
        attention, spec = first.self_attn, first.self_attn.spec
        self.attend = SingleTokenAttention(
            spec.num_heads, spec.num_kv_heads, spec.head_dim, weight.dtype, weight.device
        )
        self._rotary = decoder.rotary.table
        self._qkv = weight.new_empty(len(attention.qkv_proj.weight))
        self._attended = weight.new_empty(spec.num_heads * spec.head_dim)
        self._hidden = weight.new_empty(cast(GatedMLP, first.mlp).down_proj.in_shard.size)

    @staticmethod
    def supports(model: nn.Module) -> TypeGuard[CausalLM]:
        """Whether all layers are plain ones: a gated MLP, no experts, heads of a power of two of 32 or more, and
        weights that are not laid out for a CPU."""
        if not isinstance(model, CausalLM) or model.config.head_dim & (model.config.head_dim - 1):
            return False
        if any(parameter.is_mkldnn for parameter in model.parameters()):
            return False
        layers = list(model.model.layers)
        plain = all(type(layer) is DecoderLayer and isinstance(layer.mlp, GatedMLP) for layer in layers)
        return plain and model.config.head_dim >= 32

    def __call__(self, inputs: DeviceBatch) -> torch.Tensor:
        """One step of one row with one token.

        Returns:
            [1, vocab_size] logits, in the model's dtype.
        """
        decoder = self.model.model
        stream = decoder.embed_tokens(inputs.input_ids)[0]
        for layer in self.layers:
            stream = self._layer(layer, stream, inputs)
        head = decoder.embed_tokens if self.model.lm_head is None else self.model.lm_head
        logits = stream.new_empty(len(head.weight))
        linear(stream, head.weight, logits, norm=decoder.norm.weight, eps=decoder.norm.eps)
        return head.complete(logits.unsqueeze(0))

    def _layer(self, layer: DecoderLayer, stream: torch.Tensor, inputs: DeviceBatch) -> torch.Tensor:
        """The residual stream, [hidden_size], with what one layer adds to it. It may be written over."""
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        norm = layer.input_layernorm
        linear(
            stream,
            attention.qkv_proj.weight,
            self._qkv,
            bias=attention.qkv_proj.bias,
            norm=norm.weight,
            eps=norm.eps,
        )
        spec = attention.spec
        norms, eps = None, 0.0
        if attention.q_norm is not None and attention.k_norm is not None:
            norms, eps = (attention.q_norm.weight, attention.k_norm.weight), attention.q_norm.eps
        self.attend(
            self._qkv,
            norms,
            eps,
            self._rotary,
            inputs.slots,
            inputs.seq_lens,
            inputs.page_table,
            self.kv_cache.k[spec.layer_id],
            self.kv_cache.v[spec.layer_id],
            spec.scale,
            spec.sliding_window,
            self._attended,
        )
        stream = self._add(self._attended, attention.o_proj, stream)
        norm = layer.post_attention_layernorm
        linear(
            stream,
            mlp.gate_up_proj.weight,
            self._hidden,
            bias=mlp.gate_up_proj.bias,
            norm=norm.weight,
            eps=norm.eps,
            gated=True,
        )
        return self._add(self._hidden, mlp.down_proj, stream)

    def _add(self, x: torch.Tensor, product: RowParallelLinear, stream: torch.Tensor) -> torch.Tensor:
        """``stream + product(x)``. Of several ranks, the first one has the stream in its part of the sum."""
        bias, residual = (product.bias, stream) if self._ranks.rank == 0 else (None, None)
        linear(x, product.weight, stream, bias=bias, residual=residual)
        return self._ranks.all_reduce(stream)
