"""The decoder-only transformer of all supported architectures; modules are named as in Hugging Face checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from minisgl.attention.torch_backend import soft_cap
from minisgl.batch import DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.errors import ModelLoadError
from minisgl.layers.attention import Attention
from minisgl.layers.embedding import Embedding, LMHead
from minisgl.layers.linear import Linear, prepack_weight
from minisgl.layers.mlp import GatedMLP, MoE
from minisgl.layers.norm import RMSNorm
from minisgl.layers.rotary import Rotary, Rotation
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class DecoderLayer(nn.Module):
    """Attention and MLP, each with a norm before it and its output added to the residual stream (pre-norm).

    The previous block's output and the residual stream come separately, so that one kernel can add and normalise.
    """

    attention_class: ClassVar[type[Attention]] = Attention
    mlp_class: ClassVar[type[GatedMLP]] = GatedMLP
    moe_class: ClassVar[type[MoE]] = MoE
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm  # and that of the decoder's last norm

    def __init__(self, config: ModelConfig, layer_id: int, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        if config.residual_multiplier != 1.0 and type(self).forward is DecoderLayer.forward:
            raise ModelLoadError("residual_multiplier: the plain layer has none; use decoder_layers.ScaledLayer")
        self.input_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.self_attn = self.attention_class(
            config.hidden_size,
            attention_spec(config, layer_id),
            config.qkv_bias,
            config.o_bias,
            config.rms_norm_eps if config.qk_norm else None,
            communicator,
            packed=config.packed_attention,
            sinks=config.attention_sinks,
        )
        self.post_attention_layernorm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        moe = config.moe
        self.mlp: nn.Module
        if moe is not None and moe.layers[layer_id]:
            self.mlp = self.moe_class(
                config.hidden_size,
                moe.intermediate_size,
                moe.num_experts,
                moe.experts_per_token,
                moe.normalize,
                communicator,
            )
        else:
            self.mlp = self.mlp_class(
                config.hidden_size,
                config.intermediate_size,
                config.mlp_bias,
                communicator,
                packed=config.packed_mlp,
            )

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs ``x`` and ``residual`` of the next layer, both [T, hidden_size]."""
        x, residual = self.input_layernorm.add_and_norm(x, residual)
        x = self.self_attn(x, rotation)
        x, residual = self.post_attention_layernorm.add_and_norm(x, residual)
        return self.mlp(x), residual


class Decoder(nn.Module):
    """Embedding, layers and the final norm."""

    def __init__(self, config: ModelConfig, layer: type[nn.Module], communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size, communicator)
        self.embedding_multiplier = config.embedding_multiplier
        self.layers = nn.ModuleList(layer(config, layer_id, communicator) for layer_id in range(config.num_layers))
        norm_class: type[RMSNorm] = getattr(layer, "norm_class", RMSNorm)
        self.norm = norm_class(config.hidden_size, config.rms_norm_eps)
        self.rotary = Rotary(config.head_dim, config.max_position_embeddings, config.rope)
        ropes = [config.rope]
        for rope in config.layer_ropes:
            if rope not in ropes:
                ropes.append(rope)
        self.other_rotaries = nn.ModuleList(
            Rotary(config.head_dim, config.max_position_embeddings, rope) for rope in ropes[1:]
        )
        self._rope_of_layer = [ropes.index(rope) for rope in config.layer_ropes or (config.rope,) * config.num_layers]

    def embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Begin the residual stream: [T] int32 token ids → [T, hidden_size]."""
        x: torch.Tensor = self.embed_tokens(input_ids)
        if self.embedding_multiplier == 1.0:
            return x
        # The factor has been rounded to the model's dtype in training.
        return x * torch.tensor(self.embedding_multiplier, dtype=x.dtype).item()

    def rotary_of(self, layer_id: int) -> Rotary:
        """The rotary embedding of one layer."""
        which = self._rope_of_layer[layer_id]
        rotary = self.other_rotaries[which - 1] if which else self.rotary
        assert isinstance(rotary, Rotary)
        return rotary

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T] int32 token ids and their positions → [T, hidden_size]."""
        x = self.embed(input_ids)
        rotations = [rotary(positions, x.dtype) for rotary in (self.rotary, *self.other_rotaries)]
        residual = None
        for layer, which in zip(self.layers, self._rope_of_layer, strict=True):
            x, residual = layer(x, residual, rotations[which])
        hidden, _ = self.norm.add_and_norm(x, residual)
        return hidden


class CausalLM(nn.Module):
    """A decoder with an LM head: the base class of all architectures. Call it inside `forward_context`.

    Raises `ConfigError` if the ranks cannot share heads or widths equally.
    """

    layer: ClassVar[type[nn.Module]] = DecoderLayer
    """Class of the layers, built with (config, layer_id, communicator). Every rank computes all of a part that is built
    without the communicator. Attention needs it, because the ranks share the KV cache."""

    checkpoint_names: ClassVar[Mapping[str, str]] = {}
    """Parts of tensors' names, between dots, that checkpoints spell differently: ours → theirs."""

    unused: ClassVar[tuple[str, ...]] = ()
    """Beginnings of names of tensors that are not needed, such as those of a part that looks at images."""

    hidden_act: ClassVar[str] = "silu"
    """Activation of the MLPs. A subclass whose layers have another one says so here."""

    def __init__(self, config: ModelConfig, communicator: Communicator = SINGLE_RANK) -> None:
        super().__init__()
        self.config = config
        self.communicator = communicator
        self.model = Decoder(config, self.layer, communicator)
        self.lm_head = None
        if not config.tie_word_embeddings:
            self.lm_head = LMHead(config.hidden_size, config.vocab_size, communicator)

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        """Fields of `ModelConfig` in which this architecture differs from the plain decoder."""
        return {}

    def forward(self, inputs: DeviceBatch) -> torch.Tensor:
        """Run one step and return the logits of ``inputs.logit_rows``, [S, vocab_size], in the model's dtype."""
        return self.logits(self.hidden_states(inputs))

    def hidden_states(self, inputs: DeviceBatch) -> torch.Tensor:
        """Run one step up to the LM head: [S, hidden_size] of ``inputs.logit_rows``."""
        hidden: torch.Tensor = self.model(inputs.input_ids, inputs.positions).index_select(0, inputs.logit_rows)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The LM head: [S, hidden_size] to [S, vocab_size]."""
        head = self.model.embed_tokens.logits if self.lm_head is None else self.lm_head
        return self.finish_logits(head(hidden))

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """Multiply and cap what the LM head returns, if the model does that."""
        config = self.config
        if config.logits_multiplier != 1.0:
            logits = logits * config.logits_multiplier
        return logits if config.logits_soft_cap is None else soft_cap(logits, config.logits_soft_cap)


def attention_spec(config: ModelConfig, layer_id: int) -> AttentionSpec:
    """The attention of one layer, over all ranks."""
    return AttentionSpec(
        layer_id=layer_id,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        scale=config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
        sliding_window=config.sliding_windows[layer_id],
        soft_cap=config.attention_soft_cap,
    )


def prepack_weights(model: nn.Module) -> None:
    """Prepack every `Linear` for the CPU. A tied LM head gets a copy, since the embedding reads the table by rows."""
    if isinstance(model, CausalLM) and model.lm_head is None:
        model.lm_head = _untied_lm_head(model.model.embed_tokens)
    for module in model.modules():
        if isinstance(module, Linear):
            module.weight = prepack_weight(module.weight)


def _untied_lm_head(table: Embedding) -> LMHead:
    with torch.device("meta"):
        head = LMHead(table.hidden_size, table.shard.total, table.communicator)
    del head.weight  # a parameter, which a quantised table could not replace
    head.weight = table.weight
    return head
