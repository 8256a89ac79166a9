"""The supported architectures. Each says how it differs from the plain decoder, given its Hugging Face config."""

from __future__ import annotations

from typing import Any

from transformers import PretrainedConfig

from minisgl.errors import ModelLoadError
from minisgl.layers.rotary import NO_POSITIONS
from minisgl.models.config import MoEConfig, rope_settings
from minisgl.models.decoder import CausalLM


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
        return {"qkv_bias": True, "sliding_windows": _windows(hf)}


class Qwen3(CausalLM):
    """Qwen3: QK-norm; some layers may have a sliding window."""

    @staticmethod
    def differences(hf: PretrainedConfig) -> dict[str, Any]:
        biases = {"qkv_bias": hf.attention_bias, "o_bias": hf.attention_bias}
        return {"qk_norm": True, "sliding_windows": _windows(hf), **biases}


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
        return {"rope": rope, "layer_ropes": ropes, "sliding_windows": _windows(hf), **biases}


def _windows(hf: PretrainedConfig) -> tuple[int | None, ...]:
    windows = {"full_attention": None, "sliding_attention": hf.sliding_window}
    for layer_type in hf.layer_types:
        if layer_type not in windows:
            raise ModelLoadError(f"layer type {layer_type!r} is not supported; choose from {', '.join(windows)}")
    return tuple(windows[layer_type] for layer_type in hf.layer_types)
