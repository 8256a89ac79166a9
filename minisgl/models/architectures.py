"""The supported architectures. Each says how it differs from the plain decoder, given its Hugging Face config."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from minisgl.errors import ModelLoadError
from minisgl.layers.mlp import ClampedExperts
from minisgl.layers.rotary import NO_POSITIONS
from minisgl.models.config import MoEConfig, rope_settings
from minisgl.models.decoder import CausalLM
from minisgl.models.decoder_layers import ClampedMoELayer, GemmaLayer, OlmoLayer, SandwichLayer, ScaledLayer

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class Llama(CausalLM):
    """Llama 2 and 3 (Touvron et al. 2023), SmolLM2: the plain decoder, with optional biases."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}


class Mistral(CausalLM):
    """Mistral (Jiang et al. 2023): one sliding window for all layers, where the config has one."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {"sliding_windows": (hf.sliding_window,) * hf.num_hidden_layers}


class Qwen2(CausalLM):
    """Qwen2 and 2.5: biases on q, k and v; some layers may have a sliding window."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {"qkv_bias": True, "sliding_windows": layer_windows(hf)}


class Qwen3(CausalLM):
    """Qwen3: QK-norm; some layers may have a sliding window."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        biases = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}
        return {"qk_norm": True, "sliding_windows": layer_windows(hf), **biases}


class Qwen3Moe(CausalLM):
    """Qwen3-MoE: Qwen3 with experts in some or all layers; a sliding window, where there is one, in all."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        layers = range(hf.num_hidden_layers)
        moe = MoEConfig(
            num_experts=hf.num_experts,
            experts_per_token=hf.num_experts_per_tok,
            intermediate_size=hf.moe_intermediate_size,
            normalize=hf.norm_topk_prob,
            layers=tuple(
                layer not in hf.mlp_only_layers and hf.num_experts > 0 and (layer + 1) % hf.decoder_sparse_step == 0
                for layer in layers
            ),
        )
        biases = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}
        return {"qk_norm": True, "moe": moe, "sliding_windows": (hf.sliding_window,) * len(layers), **biases}


class SmolLM3(CausalLM):
    """SmolLM3: some layers do not see positions (NoPE), which helps with long contexts."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        rope = rope_settings(hf)
        biases = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias, "mlp_bias": hf.mlp_bias}
        ropes = tuple(rope if rotates else NO_POSITIONS for rotates in hf.no_rope_layers)
        return {"rope": rope, "layer_ropes": ropes, "sliding_windows": layer_windows(hf), **biases}


class Olmo(CausalLM):
    """OLMo 2 (OLMo Team 2024): norms behind the blocks, QK-norm over the whole width."""

    layer = OlmoLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {"qk_norm": True, "qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}


class Olmo3(Olmo):
    """OLMo 3: three layers of four have a sliding window, and positions that are not stretched."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return Olmo.differences(hf) | _by_layer_type(hf)


class Granite(CausalLM):
    """Granite 3 (IBM): the plain decoder with four factors, which keep activations and logits in range."""

    layer = ScaledLayer

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {
            "qkv_bias": hf.attention_bias,
            "o_bias": hf.attention_bias,
            "mlp_bias": getattr(hf, "mlp_bias", False),
            "attention_scale": hf.attention_multiplier,
            "embedding_multiplier": hf.embedding_multiplier,
            "residual_multiplier": hf.residual_multiplier,
            "logits_multiplier": 1 / hf.logits_scaling,
        }


class Granite4(Granite):
    """Granite 4 without experts and Mamba layers. Its MLP is the one that experts would share."""

    checkpoint_names: ClassVar[dict[str, str]] = {
        "mlp": "shared_mlp",
        "gate_up_proj": "input_linear",
        "down_proj": "output_linear",
    }

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        if hf.num_local_experts or set(hf.layer_types) != {"full_attention"}:
            raise ModelLoadError(
                "only dense Granite 4 is supported: num_local_experts must be 0 and all layers attention"
            )
        rope = rope_settings(hf) if hf.position_embedding_type == "rope" else NO_POSITIONS
        differences = {"rope": rope, "intermediate_size": hf.shared_intermediate_size, "packed_mlp": True}
        return Granite.differences(hf) | differences


class Phi3(CausalLM):
    """Phi-3 and Phi-4 (Microsoft 2024): packed projections; Phi-4-mini rotates three quarters of each head."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        rope = rope_settings(hf, partial=True)
        if rope.rope_type == "longrope":  # the factor is a ratio of lengths, one of which an option may reduce
            original = rope.scaling.get("original_max_position_embeddings") or hf.original_max_position_embeddings
            lengths = {"original_max_position_embeddings": original, "factor": hf.max_position_embeddings / original}
            rope = replace(rope, scaling={**rope.scaling, **lengths})
        windows = (hf.sliding_window,) * hf.num_hidden_layers
        return {"rope": rope, "packed_attention": True, "packed_mlp": True, "sliding_windows": windows}


class Gemma2(CausalLM):
    """Gemma 2 (Gemma Team 2024): sandwich norms, soft caps on scores and logits, a window in every other layer."""

    layer = GemmaLayer
    hidden_act = "gelu_pytorch_tanh"
    checkpoint_names: ClassVar[dict[str, str]] = {
        "attention_output_norm": "post_attention_layernorm",
        "post_attention_layernorm": "pre_feedforward_layernorm",
        "mlp_output_norm": "post_feedforward_layernorm",
    }

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        return {
            "qkv_bias": hf.attention_bias,
            "o_bias": hf.attention_bias,
            "sliding_windows": layer_windows(hf),
            "attention_scale": hf.query_pre_attn_scalar**-0.5,
            "attention_soft_cap": hf.attn_logit_softcapping,
            "logits_soft_cap": hf.final_logit_softcapping,
            "embedding_multiplier": hf.hidden_size**0.5,
        }


class Gemma3(Gemma2):
    """The text model of Gemma 3 (Gemma Team 2025): QK-norm in place of a cap, five layers of six with a window."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        if hf.use_bidirectional_attention:
            raise ModelLoadError("use_bidirectional_attention is not supported, only causal attention")
        return Gemma2.differences(hf) | _by_layer_type(hf) | {"qk_norm": True, "attention_soft_cap": None}


_TEXT_MODEL = {"model": "language_model.model", "lm_head": "language_model.lm_head"}
_SEES_IMAGES = ("vision_tower.", "multi_modal_projector.")


class Mistral3(Mistral):
    """The text model of Mistral Small 3.1 and later, in a checkpoint that can also look at images."""

    checkpoint_names = _TEXT_MODEL
    unused = _SEES_IMAGES


class Gemma3OfImages(Gemma3):
    """The text model of Gemma 3 in a checkpoint that can also look at images: all sizes from 4B on."""

    checkpoint_names: ClassVar[dict[str, str]] = {**Gemma3.checkpoint_names, **_TEXT_MODEL}
    unused = _SEES_IMAGES


class Glm4(CausalLM):
    """GLM-4 (0414): sandwich norms; neighbours are a pair in the half of each head that is rotated."""

    layer = SandwichLayer
    checkpoint_names: ClassVar[dict[str, str]] = {
        "attention_output_norm": "post_self_attn_layernorm",
        "mlp_output_norm": "post_mlp_layernorm",
    }

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        rope = rope_settings(hf, partial=True, interleaved=True)
        return {"rope": rope, "qkv_bias": hf.attention_bias, "packed_mlp": True}


class GptOss(CausalLM):
    """gpt-oss (OpenAI 2025): attention sinks, a window in every other layer, YaRN, and experts in all layers."""

    layer = ClampedMoELayer
    checkpoint_names: ClassVar[dict[str, str]] = {"gate": "router"}

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        gate = {"swiglu_alpha": ClampedExperts.ALPHA, "swiglu_limit": ClampedExperts.LIMIT}
        for name, value in gate.items():
            if getattr(hf, name, value) != value:
                raise ModelLoadError(f"{name} {getattr(hf, name)} is not supported, only {value}")
        moe = MoEConfig(
            num_experts=hf.num_local_experts,
            experts_per_token=hf.num_experts_per_tok,
            intermediate_size=hf.intermediate_size,
            normalize=True,
            layers=(True,) * hf.num_hidden_layers,
        )
        biases = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}
        return {"moe": moe, "attention_sinks": True, "sliding_windows": layer_windows(hf), **biases}


def _by_layer_type(hf: PretrainedConfig) -> dict[str, Any]:
    """Windows and rotary embeddings of layers of two types. The rope of the config is that of layers without window."""
    ropes = {layer_type: rope_settings(hf, layer_type) for layer_type in {"full_attention", *hf.layer_types}}
    return {
        "rope": ropes["full_attention"],
        "layer_ropes": tuple(ropes[layer_type] for layer_type in hf.layer_types),
        "sliding_windows": layer_windows(hf),
    }


def layer_windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    """The sliding window of each layer, by ``layer_types``. Raises `ModelLoadError` for a type that we do not know."""
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    for layer_type in hf.layer_types:
        if layer_type not in windows:
            raise ModelLoadError(f"layer type {layer_type!r} is not supported; choose from {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in hf.layer_types)
