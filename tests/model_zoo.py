"""Tiny random checkpoints of every architecture, made with transformers, and a way to run ours beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel

from minisgl.attention.torch_backend import DenseAttention
from minisgl.batch import build_batch
from minisgl.context import AttentionBackend, ForwardContext, forward_context
from tests.steps import device_batch

VOCAB_SIZE = 211

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_MODEL_TYPES: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("llama", {}),
    "MistralForCausalLM": ("mistral", {"sliding_window": None}),
    "Qwen2ForCausalLM": ("qwen2", {}),
    "Qwen3ForCausalLM": ("qwen3", {}),
    "Qwen3MoeForCausalLM": (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
    ),
    "SmolLM3ForCausalLM": ("smollm3", {"no_rope_layers": [1, 0]}),
    "Olmo2ForCausalLM": ("olmo2", {}),
    "Olmo3ForCausalLM": ("olmo3", {"sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}),
    "GraniteForCausalLM": ("granite", {}),
    "GraniteMoeHybridForCausalLM": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "shared_intermediate_size": 48,
            "layer_types": ["full_attention"] * 2,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
        },
    ),
    "Phi3ForCausalLM": ("phi3", {}),
    "Gemma2ForCausalLM": ("gemma2", {"sliding_window": 6, "query_pre_attn_scalar": 12}),
    "Gemma3ForCausalLM": (
        "gemma3_text",
        {
            "sliding_window": 6,
            "query_pre_attn_scalar": 12,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 10000.0},
            },
        },
    ),
    "Glm4ForCausalLM": ("glm4", {}),
    "GptOssForCausalLM": (
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
_SEES_IMAGES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mistral3ForConditionalGeneration": (
        "MistralForCausalLM",
        {"vision_config": {"model_type": "pixtral", **_VISION, "head_dim": 8, "image_size": 28, "patch_size": 7}},
    ),
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {
            "vision_config": {"model_type": "siglip_vision_model", **_VISION, "image_size": 28, "patch_size": 7},
            "mm_tokens_per_image": 4,
        },
    ),
}
"""Models of images and text: the text model in each, and its other settings."""


@dataclass(frozen=True)
class Variant:
    """A tiny config: an architecture, and how it departs from the tiny standard."""

    name: str
    architecture: str
    overrides: Mapping[str, Any] = field(default_factory=dict)

    def checkpoint(self, directory: Path) -> tuple[Path, PreTrainedModel]:
        return tiny_checkpoint(directory, self.architecture, **self.overrides)


def _rope(rope_type: str, **parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **parameters}}


ROPE_VARIANTS = [
    Variant("linear", "LlamaForCausalLM", _rope("linear", factor=4.0)),
    Variant(
        "llama3",
        "LlamaForCausalLM",
        _rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64),
    ),
    Variant("yarn", "Qwen3ForCausalLM", _rope("yarn", factor=4.0, original_max_position_embeddings=128)),
    Variant(
        "yarn-attention-factor",
        "Qwen2ForCausalLM",
        _rope("yarn", factor=4.0, original_max_position_embeddings=128, attention_factor=0.8, beta_fast=16.0),
    ),
    Variant(
        "yarn-mscale",
        "LlamaForCausalLM",
        _rope("yarn", factor=8.0, original_max_position_embeddings=64, mscale=1.4, mscale_all_dim=0.7, truncate=False),
    ),
]

ARCHITECTURES = [
    Variant("llama", "LlamaForCausalLM"),
    Variant("llama-tied", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    Variant("llama-biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Variant("llama-mha", "LlamaForCausalLM", {"num_key_value_heads": 4}),
    Variant("llama-mqa-head-dim-24", "LlamaForCausalLM", {"num_key_value_heads": 1, "head_dim": 24}),
    Variant("mistral", "MistralForCausalLM"),
    Variant("mistral-window", "MistralForCausalLM", {"sliding_window": 5}),
    Variant("qwen2", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Variant(
        "qwen2-max-window-layers",
        "Qwen2ForCausalLM",
        {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 1},
    ),
    Variant(
        "qwen2-layer-types",
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 4,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    Variant("qwen3", "Qwen3ForCausalLM", {"head_dim": 16}),
    Variant("qwen3-biases", "Qwen3ForCausalLM", {"attention_bias": True, "tie_word_embeddings": True}),
    Variant("qwen3-moe", "Qwen3MoeForCausalLM"),
    Variant(
        "qwen3-moe-dense-layer",
        "Qwen3MoeForCausalLM",
        {"mlp_only_layers": [1], "num_hidden_layers": 3, "norm_topk_prob": False},
    ),
    Variant(
        "qwen3-moe-sparse-step",
        "Qwen3MoeForCausalLM",
        {"decoder_sparse_step": 2, "use_sliding_window": True, "sliding_window": 7},
    ),
    Variant("smollm3", "SmolLM3ForCausalLM"),
    Variant(
        "smollm3-window",
        "SmolLM3ForCausalLM",
        {
            "num_hidden_layers": 3,
            "no_rope_layers": [0, 1, 0],
            "use_sliding_window": True,
            "sliding_window": 5,
            "tie_word_embeddings": True,
            "attention_bias": True,
        },
    ),
    Variant("olmo2", "Olmo2ForCausalLM", {"attention_bias": True}),
    Variant(
        "olmo3",
        "Olmo3ForCausalLM",
        {
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 5000.0},
                "full_attention": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 64,
                    "rope_theta": 5000.0,
                },
            },
        },
    ),
    Variant(
        "granite",
        "GraniteForCausalLM",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.1,
            "logits_scaling": 2.5,
            "tie_word_embeddings": True,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    Variant("granite4", "GraniteMoeHybridForCausalLM", {"residual_multiplier": 0.4, "attention_multiplier": 0.1}),
    Variant("granite4-nope", "GraniteMoeHybridForCausalLM", {"position_embedding_type": "nope", "logits_scaling": 3.0}),
    Variant("phi4", "Phi3ForCausalLM", {"head_dim": 8}),
    Variant(
        "phi4-mini",
        "Phi3ForCausalLM",
        {
            "original_max_position_embeddings": 4,
            "sliding_window": 9,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
                "short_factor": [1.0, 1.5],
                "long_factor": [1.2, 7.0],
            },
        },
    ),
    Variant("mistral-small", "MistralForCausalLM", {"head_dim": 24, "sliding_window": None}),
    Variant("gemma2", "Gemma2ForCausalLM", {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    Variant("gemma3", "Gemma3ForCausalLM", {"tie_word_embeddings": True}),
    Variant("gemma3-cap", "Gemma3ForCausalLM", {"final_logit_softcapping": 5.0, "head_dim": 16}),
    Variant("glm4", "Glm4ForCausalLM"),
    Variant(
        "glm4-three-quarters",
        "Glm4ForCausalLM",
        {
            "head_dim": 16,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        },
    ),
    Variant("gpt-oss", "GptOssForCausalLM", {"head_dim": 16}),
    Variant("mistral3-images", "Mistral3ForConditionalGeneration"),
    Variant("gemma3-images", "Gemma3ForConditionalGeneration", {"tie_word_embeddings": True}),
    *ROPE_VARIANTS,
]
"""Every supported architecture and every option of one."""


def tiny_checkpoint(directory: Path, architecture: str, **overrides: Any) -> tuple[Path, PreTrainedModel]:
    """Save a tiny random float32 checkpoint under ``directory``.

    All parameters are random, norms and biases included, and large enough that attention is far from uniform.

    Args:
        directory: parent of the checkpoint's directory.
        architecture: name of the transformers class.
        overrides: config fields.

    Returns:
        The directory and the transformers model, in evaluation mode.
    """
    model_type, defaults = _MODEL_TYPES.get(architecture) or (_model_type(architecture), {})
    sizes = {**_SIZES, **defaults, **overrides}
    from_config: Any = AutoModelForCausalLM.from_config
    if architecture in _SEES_IMAGES:
        text, others = _SEES_IMAGES[architecture]
        text_type, defaults = _MODEL_TYPES[text]
        tied = {"tie_word_embeddings": sizes["tie_word_embeddings"]}
        sizes = {"text_config": {"model_type": text_type, **_SIZES, **defaults, **overrides}, **others, **tied}
        from_config = AutoModelForImageTextToText.from_config
    config = AutoConfig.for_model(model_type, **sizes)
    model: PreTrainedModel = from_config(config, dtype=torch.float32, experts_implementation="eager")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, std = (1.0, 0.3) if "norm" in name else (0.0, 0.3)
            parameter.normal_(mean, std, generator=generator)
    path = directory / architecture
    model.save_pretrained(path)
    model.train(False)
    return path, model


def _model_type(architecture: str) -> str:
    """That of an architecture that transformers has and we have not."""
    model_type: str = getattr(transformers, architecture).config_class.model_type
    return model_type


def random_tokens(*lengths: int, seed: int = 0) -> list[np.ndarray[Any, np.dtype[np.int32]]]:
    """A random token sequence, int32, of each length."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB_SIZE, length, dtype=np.int32) for length in lengths]


def hf_logits(model: PreTrainedModel, tokens: Sequence[int] | np.ndarray[Any, Any]) -> torch.Tensor:
    """[len(tokens), vocab] logits of transformers for one whole sequence."""
    with torch.no_grad():
        logits: torch.Tensor = model(torch.as_tensor(np.asarray(tokens), dtype=torch.long)[None]).logits[0]
    return logits


def run_dense(model: torch.nn.Module, *sequences: np.ndarray[Any, Any]) -> list[torch.Tensor]:
    """[len, vocab] logits of each whole sequence, in one step without a KV cache."""
    nowhere = np.zeros((len(sequences), 512), dtype=np.int32)
    return Runner(model, DenseAttention(), nowhere, page_size=1).step(dict(enumerate(sequences)))


class Runner:
    """Runs steps of a model, without a scheduler.

    Args:
        model: one of ours.
        backend: its attention.
        page_table: int32[rows, width], for backends with a KV cache.
        page_size: tokens a page.
    """

    def __init__(
        self, model: torch.nn.Module, backend: AttentionBackend, page_table: np.ndarray[Any, Any], page_size: int
    ) -> None:
        self.model = model  # or, put in its place, what computes the same
        self.device = next(model.parameters()).device
        self.backend = backend
        self.page_table = page_table
        self.page_size = page_size
        self.lengths = np.zeros(len(page_table), dtype=np.int32)

    def step(self, fed: Mapping[int, np.ndarray[Any, Any]]) -> list[torch.Tensor]:
        """Feed tokens to some slots, those with a KV prefix and one token first (as decode rows must be).

        Returns:
            [fed tokens, vocab] logits of each slot, in the order of ``fed``.
        """
        decode = [slot for slot, tokens in fed.items() if len(tokens) == 1 and self.lengths[slot] > 0]
        order = [*decode, *(slot for slot in fed if slot not in decode)]
        slots = np.array(order, dtype=np.int32)
        batch = build_batch(
            slots,
            q_lens=np.array([len(fed[slot]) for slot in order], dtype=np.int32),
            kv_lens=self.lengths[slots],
            page_table=self.page_table,
            page_size=self.page_size,
            sample_rows=np.arange(len(order), dtype=np.int32),
            output_index=np.zeros(len(order), dtype=np.int32),
            num_decode=len(decode),
        )
        input_ids = np.concatenate([fed[slot] for slot in order])
        inputs = device_batch(batch, input_ids, self.page_table, self.device)
        self.backend.plan(batch, inputs)
        with torch.no_grad(), forward_context(ForwardContext(inputs, self.backend)):
            logits = self.model(inputs)
        self.lengths[slots] += batch.q_lens
        by_slot = dict(zip(order, logits.split(batch.q_lens.tolist()), strict=True))
        return [by_slot[slot] for slot in fed]
