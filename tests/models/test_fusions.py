"""A model with fused layers gives the logits of the plain one, with the same parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.errors import ConfigError
from minisgl.layers.attention import Attention
from minisgl.layers.fused import FusedAttention, FusedExperts, FusedGatedMLP, FusedRMSNorm, NoRotary
from minisgl.layers.mlp import GatedMLP, MoE
from minisgl.layers.norm import RMSNorm
from minisgl.layers.quantization import QuantizedWeight
from minisgl.layers.quantizers import WEIGHT_ONLY_TOKENS, Fp8, Fp8WeightOnly, RoundedRows, takes_rounded_rows
from minisgl.layers.rotary import Rotary
from minisgl.layers.sharding import Shard
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import CausalLM, DecoderLayer
from minisgl.models.fusions import LAYER_FUSIONS, fuse_layers, select_fusions
from minisgl.models.loader import load_model
from tests.kernels.closeness import DEVICE
from tests.model_zoo import ARCHITECTURES, random_tokens, run_dense, tiny_checkpoint
from tests.paged_runner import PagedRunner

VARIANTS = [
    variant
    for variant in ARCHITECTURES
    if variant.name in ("llama", "llama-biases", "llama-mqa-head-dim-24", "mistral-window", "qwen2", "qwen3", "yarn")
    or variant.name in ("smollm3-window", "olmo3", "granite", "phi4-mini", "gemma2", "gemma3", "glm4", "gpt-oss")
]


def load(path: Path, quantization: str = "none") -> tuple[CausalLM, ModelConfig]:
    config = ModelConfig.from_dir(path)
    model: Any = load_model(path, config, torch.float32, torch.device(DEVICE), quantization=quantization)
    return model, config


def steps(model: torch.nn.Module, config: ModelConfig) -> list[torch.Tensor]:
    """Logits of a prefill, a chunk with a decode row, and a decode step."""
    runner = PagedRunner.of(model, config, torch.float32, rows=2, max_len=32, page_size=4)
    first, second = random_tokens(9, 12, seed=3)
    logits = runner.step({0: first})
    logits += runner.step({0: first[:1], 1: second[:7]})
    logits += runner.step({1: second[7:]})
    return logits + runner.step({0: first[1:2], 1: second[:1]})


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_logits_are_those_of_the_plain_model(variant: Any, tmp_path: Path) -> None:
    path, _ = variant.checkpoint(tmp_path)
    model, config = load(path)
    expected = steps(model, config)
    fuse_layers(model)
    for ours, plain in zip(steps(model, config), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("fusion", LAYER_FUSIONS)
def test_each_fusion_alone(fusion: str, tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    model, config = load(path)
    expected = steps(model, config)
    fuse_layers(model, {fusion})
    kinds = {type(module) for module in model.modules()}
    assert (FusedRMSNorm in kinds, RMSNorm in kinds) == (fusion == "norm", fusion != "norm")
    assert (FusedAttention in kinds, Attention in kinds) == (fusion == "rope", fusion != "rope")
    assert (FusedGatedMLP in kinds, GatedMLP in kinds) == (fusion == "activation", fusion != "activation")
    assert isinstance(model.model.rotary, NoRotary) == (fusion == "rope")
    for ours, plain in zip(steps(model, config), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)


def test_parameters_stay_the_same_tensors_under_the_same_names(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", attention_bias=True)
    model, _ = load(path)
    before = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    fuse_layers(model)
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == before
    assert set(model.state_dict()) == set(before)


def test_without_a_kv_cache_the_fused_model_still_runs(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    model, _ = load(path)
    [tokens] = random_tokens(11)
    [expected] = run_dense(model, tokens)
    fuse_layers(model)
    torch.testing.assert_close(run_dense(model, tokens)[0], expected, rtol=2e-5, atol=2e-5)


def test_the_experts_of_a_mixture_are_fused_and_its_router_stays(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM")
    model, config = load(path)
    expected = steps(model, config)
    fuse_layers(model)
    assert all(type(layer.mlp) is MoE for layer in model.model.layers)
    assert all(type(layer.mlp.experts) is FusedExperts for layer in model.model.layers)
    for ours, plain in zip(steps(model, config), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)


def long_steps(model: torch.nn.Module, config: ModelConfig) -> list[torch.Tensor]:
    """Logits of a prefill of so many tokens that products round their inputs, with and without a KV cache, and of a
    decode step, whose products do not."""
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=32, page_size=4)
    [tokens] = random_tokens(WEIGHT_ONLY_TOKENS + 4)
    return [run_dense(model, tokens)[0], *runner.step({0: tokens}), *runner.step({0: tokens[:1]})]


@pytest.mark.parametrize("fusions", [("norm",), ("activation",), ("norm", "rope"), LAYER_FUSIONS])
def test_the_kernel_before_a_product_rounds_what_it_would_round(
    fusions: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", attention_bias=True)
    with monkeypatch.context() as patch:
        for module in ("minisgl.layers.fused", "minisgl.models.fusions"):
            patch.setattr(f"{module}.takes_rounded_rows", lambda weight: False)
        model, config = load(path, "fp8")
        fuse_layers(model, fusions)
        expected = long_steps(model, config)
    model, config = load(path, "fp8")
    fuse_layers(model, fusions)
    for ours, apart in zip(long_steps(model, config), expected, strict=True):
        assert torch.equal(ours, apart)

    rounded: list[str] = []
    for name, module in model.model.layers[1].named_modules():
        module.register_forward_pre_hook(
            lambda _, inputs, name=name: rounded.append(name) if isinstance(inputs[0], RoundedRows) else None
        )
    long_steps(model, config)
    names = ["self_attn", "self_attn.qkv_proj", "mlp", "mlp.gate_up_proj"] if "norm" in fusions else []
    assert rounded == 2 * (names + (["mlp.down_proj"] if "activation" in fusions else []))


def rounding_norms(model: CausalLM) -> list[str]:
    return [name for name, norm in model.named_modules() if isinstance(norm, FusedRMSNorm) and norm.rounds]


def test_norms_round_only_before_products_that_do(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    for scheme in ("none", "fp8", "int8"):
        model, _ = load(path, scheme)
        fuse_layers(model)
        before_products = [
            f"model.layers.{layer}.{name}"
            for layer in range(len(model.model.layers))
            for name in ("input_layernorm", "post_attention_layernorm")
        ]
        assert rounding_norms(model) == (before_products if scheme == "fp8" else []), scheme


def test_a_scheme_of_ones_own_gets_its_rows_as_they_are() -> None:
    """Derived from fp8, it may multiply in another way, which rounded rows would pass by."""

    class Own(Fp8):
        pass

    weights = [QuantizedWeight(scheme(), 32, Shard.whole(32), torch.float32) for scheme in (Fp8, Own, Fp8WeightOnly)]
    assert [takes_rounded_rows(weight) for weight in weights] == [True, False, False]


def test_products_of_other_sizes_round_for_themselves(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", intermediate_size=100)
    model, config = load(path, "fp8")
    fuse_layers(model)
    assert [name.rsplit(".")[-1] for name in rounding_norms(model)] == ["input_layernorm"] * config.num_layers
    assert all(bool(logits.isfinite().all()) for logits in long_steps(model, config))


def test_norms_of_layers_of_another_class_do_not_round(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    model, _ = load(path, "fp8")
    for layer in model.model.layers:
        layer.__class__ = StudentsLayer
    fuse_layers(model)
    assert rounding_norms(model) == []


class StudentsLayer(DecoderLayer):
    """A layer of a class that the fusions do not know."""


class StudentsNorm(RMSNorm):
    """It may compute something else, which the fused norm would not."""


def test_subclasses_of_the_plain_layers_stay(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    model, _ = load(path)
    model.model.norm.__class__ = StudentsNorm
    fuse_layers(model)
    assert type(model.model.norm) is StudentsNorm
    assert type(model.model.layers[0].input_layernorm) is FusedRMSNorm


def test_layers_of_another_class_keep_the_rotation_that_they_may_read(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    model, config = load(path)
    expected = steps(model, config)
    for layer in model.model.layers:
        layer.__class__ = StudentsLayer
    fuse_layers(model)
    assert type(model.model.rotary) is Rotary
    for ours, plain in zip(steps(model, config), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)


def test_an_unknown_fusion_is_refused_by_name(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    with pytest.raises(ConfigError, match=r"fusions: no fusion is called 'conv'; choose from norm, rope, activation"):
        fuse_layers(load(path)[0], {"conv"})


def test_a_device_without_kernels_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    monkeypatch.setattr("minisgl.kernels.launch.INTERPRETED", False)
    model = load(path)[0].cpu()
    with pytest.raises(ConfigError, match="Triton kernels run on CUDA, not on 'cpu'"):
        fuse_layers(model)


def test_without_triton_fusions_are_refused_or_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("minisgl.models.fusions.has_triton", lambda: False)
    with pytest.raises(ConfigError, match=r"fusions: Triton is not installed; .* or use fusions=\(\)"):
        select_fusions(["norm"], torch.device("cuda"))
    assert select_fusions(None, torch.device("cuda")) == select_fusions((), torch.device("cuda")) == ()
