"""A decoder for steps with some dozen rows: seven kernels a layer; its products take in what stands around them."""

from __future__ import annotations

from typing import TypeGuard, cast

import torch
import torch.nn.functional as F
from torch import nn

from minisgl.core import DeviceBatch, get_forward_context
from minisgl.kernels.layers import FusedAttention
from minisgl.kernels.rope import rotate_and_store
from minisgl.kernels.small_batch_linear import linear
from minisgl.kvcache.paged_attention import PagedAttention
from minisgl.layers import GatedMLP
from minisgl.models.decoder import CausalLM, DecoderLayer


class SmallBatchDecoder:
    """The weights of a `CausalLM`, in other kernels: ``decoder(inputs)`` is ``model(inputs)``.

    1. norm and QKV projection; 2. QK-norm, rotary embedding and KV store; 3. the backend's attention (often two
    kernels); 4. output projection and residual addition; 5. norm, gate and up projection, SiLU and product; 6. down
    projection and residual addition. The LM head, a matrix as large as several layers, is left to the library.

    Args:
        model: of plain decoder layers, see `supports`.
    """

    def __init__(self, model: CausalLM) -> None:
        self.model = model
        self.layers = cast(list[DecoderLayer], list(model.model.layers))
        attention = self.layers[0].self_attn
        self._rotary = (attention.rotary if isinstance(attention, FusedAttention) else model.model.rotary).table

    @staticmethod
    def supports(model: nn.Module) -> TypeGuard[CausalLM]:
        """Whether all layers are plain ones: a gated MLP, no experts, and row-major weights of at most 32 bits."""
        if not isinstance(model, CausalLM):
            return False
        if any(weight.is_mkldnn or weight.dtype == torch.float64 for weight in model.parameters()):
            return False
        return all(type(layer) is DecoderLayer and isinstance(layer.mlp, GatedMLP) for layer in model.model.layers)

    def __call__(self, inputs: DeviceBatch) -> torch.Tensor:
        """One step, inside a forward context over a `PagedAttention`.

        Returns:
            [S, vocab_size] logits of ``inputs.logit_rows``, in the model's dtype.
        """
        decoder = self.model.model
        stream = F.embedding(inputs.input_ids, decoder.embed_tokens.weight)
        for layer in self.layers:
            self._layer(layer, stream, inputs)
        hidden = decoder.norm(stream.index_select(0, inputs.logit_rows))
        if self.model.lm_head is None:
            return decoder.embed_tokens.logits(hidden)
        logits: torch.Tensor = self.model.lm_head(hidden)
        return logits

    def _layer(self, layer: DecoderLayer, stream: torch.Tensor, inputs: DeviceBatch) -> None:
        """Add what one layer does to the residual stream, [T, hidden_size], in place."""
        backend = cast(PagedAttention, get_forward_context().attention)
        attention, mlp = layer.self_attn, cast(GatedMLP, layer.mlp)
        spec, norm = attention.spec, layer.input_layernorm
        qkv_proj, o_proj = attention.qkv_proj, attention.o_proj
        qkv = linear(stream, qkv_proj.weight, bias=qkv_proj.bias, norm=norm.weight, eps=norm.eps)
        q = rotate_and_store(
            qkv,
            self._rotary,
            inputs.positions,
            inputs.out_locs,
            backend.kv_cache.k[spec.layer_id],
            backend.kv_cache.v[spec.layer_id],
            attention.q_norm,
            attention.k_norm,
        )
        linear(backend.attend(q, spec).flatten(1), o_proj.weight, bias=o_proj.bias, residual=stream)
        norm, gate_up = layer.post_attention_layernorm, mlp.gate_up_proj
        hidden = linear(stream, gate_up.weight, bias=gate_up.bias, norm=norm.weight, eps=norm.eps, gated=True)
        linear(hidden, mlp.down_proj.weight, bias=mlp.down_proj.bias, residual=stream)
