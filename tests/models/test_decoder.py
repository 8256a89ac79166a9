"""Reading config.json: what it yields, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.attention.torch_backend import DenseAttention
from minisgl.context import ForwardContext, forward_context
from minisgl.errors import ModelLoadError
from minisgl.layers.linear import Linear
from minisgl.layers.sharding import PackedWeights
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, prepack_weights
from minisgl.models.loader import load_model
from tests.model_zoo import ARCHITECTURES, Variant, random_tokens, run_dense, tiny_checkpoint
from tests.steps import step_of

OLD_STYLE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 300,
}


def write_config(path: Path, **changes: Any) -> Path:
    config = {**OLD_STYLE, **changes}
    (path / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))
    return path


def test_fields_of_an_old_style_config(tmp_path: Path) -> None:
    config = ModelConfig.from_dir(write_config(tmp_path))
    assert (config.architecture, config.dtype) == ("Qwen3ForCausalLM", torch.bfloat16)
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 32)
    assert (config.hidden_size, config.intermediate_size, config.vocab_size) == (64, 96, 300)
    assert (config.rope.rope_type, config.rope.theta) == ("default", 1e6)
    assert config.sliding_windows == (None, None, None)
    assert config.tie_word_embeddings
    assert config.qk_norm
    assert not config.qkv_bias
    assert config.max_position_embeddings == 40960


@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_old_style_rope_scaling(tmp_path: Path, key: str) -> None:
    scaling = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    config = ModelConfig.from_dir(write_config(tmp_path, rope_scaling=scaling))
    assert (config.rope.rope_type, config.rope.theta) == ("yarn", 1e6)
    assert dict(config.rope.scaling) == {"factor": 4.0, "original_max_position_embeddings": 32768}
    assert config.max_position_embeddings == 131072


def test_head_dim_defaults_to_a_share_of_hidden_size(tmp_path: Path) -> None:
    llama = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "head_dim": ...}
    config = ModelConfig.from_dir(write_config(tmp_path, **llama, num_key_value_heads=...))
    assert config.head_dim == 16
    assert config.num_kv_heads == 4


def test_per_layer_windows(tmp_path: Path) -> None:
    window = {"use_sliding_window": True, "sliding_window": 8}
    assert ModelConfig.from_dir(write_config(tmp_path, **window, max_window_layers=1)).sliding_windows == (None, 8, 8)
    layer_types = ["sliding_attention", "full_attention", "sliding_attention"]
    assert ModelConfig.from_dir(write_config(tmp_path, **window, layer_types=layer_types)).sliding_windows == (
        8,
        None,
        8,
    )


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_experts(tmp_path: Path, spelling: str) -> None:
    moe = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", spelling: 5, "mlp_only_layers": [1]}
    config = ModelConfig.from_dir(write_config(tmp_path, **moe, num_experts_per_tok=2, moe_intermediate_size=16))
    assert config.moe is not None
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.intermediate_size) == (5, 2, 16)
    assert config.moe.layers == (True, False, True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["GPT2LMHeadModel"]},
            r"'GPT2LMHeadModel' is not supported.*LlamaForCausalLM.*architecture=",
        ),
        ({"architectures": ["os:system"]}, r"'os:system' is not supported"),
        ({"architectures": []}, r"'architectures' must be a list"),
        ({"architectures": ...}, r"'architectures' must be a list"),
        ({"model_type": "no_such_type"}, r"not a valid config"),
        ({"model_type": ...}, r"not a valid config"),
        ({"hidden_size": "wide"}, r"not a valid config.*hidden_size"),
        (
            {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}},
            r"rope_type 'spiral'.*default, linear, llama3, yarn",
        ),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, r"rope_type 'dynamic' is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, r"not a valid config.*factor"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is not supported"),
        ({"hidden_act": "gelu"}, r"hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 3}, r"num_attention_heads \(4\).*num_key_value_heads \(3\)"),
        ({"head_dim": 3}, r"head_dim \(3\) must be even"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"]}, r"'chunked_attention'"),
        ({"layer_types": ["full_attention"] * 2}, r"layer"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_refused_configs_name_the_field(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"(?s){message}"):
        ModelConfig.from_dir(write_config(tmp_path, **changes))


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        ModelConfig.from_dir(tmp_path)
    for content in ("{", "[]", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content.encode() if isinstance(content, str) else content)
        with pytest.raises(ModelLoadError, match=r"config\.json"):
            ModelConfig.from_dir(tmp_path)


@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_the_wanted_rows_only(tmp_path: Path, tied: bool) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", tie_word_embeddings=tied)
    model = load_model(path, ModelConfig.from_dir(path), torch.float64, torch.device("cpu"))
    batch, inputs = step_of(q_lens=[4, 5], kv_lens=[0, 0])
    inputs.input_ids += torch.arange(9, dtype=torch.int32)
    backend = DenseAttention()
    backend.plan(batch, inputs)

    def logits(*rows: int) -> torch.Tensor:
        chosen = dataclasses.replace(inputs, logit_rows=torch.tensor(rows, dtype=torch.int32))
        with torch.inference_mode(), forward_context(ForwardContext(chosen, backend)):
            out: torch.Tensor = model(chosen)
        return out

    every = logits(*range(9))
    torch.testing.assert_close(logits(8, 3), every[[8, 3]])
    assert logits().shape == (0, 211)


def test_declared_parts_cover_each_packed_parameter_once(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM", mlp_only_layers=[1], attention_bias=True)
    model = load_model(path, ModelConfig.from_dir(path), torch.float32, torch.device("cpu"), "dummy")
    packed = [module for module in model.modules() if isinstance(module, PackedWeights)]
    assert len(packed) == 2 + 1 + 1  # qkv twice, one dense MLP, one set of experts
    for module in packed:
        for parameter in module.parameters():
            parameter.zero_()
        for part in module.weight_parts():
            getattr(module, part.parameter)[part.index] += 1
        for parameter in module.parameters():
            assert (parameter == 1).all()


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = load_model(path, ModelConfig.from_dir(path), dtype, torch.device("cpu"))
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize("variant", ARCHITECTURES, ids=lambda variant: variant.name)
def test_a_model_computes_the_same_with_prepacked_weights(tmp_path: Path, variant: Variant) -> None:
    path, _ = variant.checkpoint(tmp_path)
    model, tokens = load(path), random_tokens(31, 1)
    expected = run_dense(model, *tokens)
    prepack_weights(model)
    assert all(module.weight.is_mkldnn for module in model.modules() if isinstance(module, Linear))
    for logits, before in zip(run_dense(model, *tokens), expected, strict=True):
        torch.testing.assert_close(logits, before, atol=1e-4, rtol=0)


def test_a_tied_head_gets_its_own_weight_and_nothing_else_grows(tmp_path: Path) -> None:
    path, _ = ARCHITECTURES[1].checkpoint(tmp_path)
    model = load(path)
    table = model.model.embed_tokens.weight
    size = sum(parameter.numel() for parameter in model.parameters())
    prepack_weights(model)
    assert model.lm_head is not None
    assert torch.equal(model.lm_head.weight.to_dense(), table)
    assert model.model.embed_tokens.weight is table
    assert sum(parameter.numel() for parameter in model.parameters()) == size + table.numel()


def test_a_dtype_without_a_blocked_layout_is_left_alone(tmp_path: Path) -> None:
    path, _ = ARCHITECTURES[1].checkpoint(tmp_path)
    model = load(path, torch.float64)
    before = [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()]
    prepack_weights(model)
    assert [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()] == before
