"""The decoder for single tokens against the plain one, step by step behind a prompt."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.kernels import single_token_attention, single_token_linear
from minisgl.kernels.single_token_linear import linear
from minisgl.layers.quantization import Blocks, Quantizer, Tensors
from minisgl.layers.quantizers import Int8
from minisgl.models.decoder_layers import GemmaNorm
from minisgl.models.single_token import SingleTokenDecoder
from tests.kernels.loading import DEVICE, load
from tests.model_zoo import ARCHITECTURES, Variant, random_tokens
from tests.paged_runner import PagedRunner

PHI4_MINI = next(variant for variant in ARCHITECTURES if variant.name == "phi4-mini")
HALF_A_HEAD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
GROUPED = {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 2}
VARIANTS = [
    Variant("llama-biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True, "head_dim": 32}),
    Variant("llama-mha", "LlamaForCausalLM", {"num_key_value_heads": 4, "head_dim": 64}),
    Variant("mistral-window", "MistralForCausalLM", {"sliding_window": 40, **GROUPED}),
    Variant("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True, **GROUPED}),
    Variant("smollm3", "SmolLM3ForCausalLM", {"tie_word_embeddings": True, **GROUPED}),
    Variant("phi4-mini", "Phi3ForCausalLM", {**PHI4_MINI.overrides, "head_dim": 32, "rope_parameters": HALF_A_HEAD}),
    Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 40, **GROUPED}),
]


@pytest.mark.parametrize(
    ("variant", "kv_dtype"),
    [*((variant, None) for variant in VARIANTS), (VARIANTS[-1], torch.float8_e4m3fn)],
    ids=[*(variant.name for variant in VARIANTS), "eight-bits"],
)
def test_steps_give_the_logits_of_the_plain_decoder(
    tmp_path: Path, variant: Variant, kv_dtype: torch.dtype | None
) -> None:
    """Behind prompts with one part of keys and with several, and behind a single token."""
    model, config = load(tmp_path, variant)
    prompts = random_tokens(150, 1, 31)
    runners = [PagedRunner.of(model, config, torch.float32, 3, 160, 8, kv_dtype) for _ in range(2)]
    for runner in runners:
        runner.step(dict(enumerate(prompts)))
    plain, fast = runners
    fast.model = SingleTokenDecoder(model, fast.cache)
    assert SingleTokenDecoder.supports(model)
    for slot in (0, 1, 2, 0):
        step = {slot: np.array([7 + slot], dtype=np.int32)}
        expected, logits = plain.step(step)[0], fast.step(step)[0]
        assert logits.shape == (1, config.vocab_size)
        torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    for ours, reference in ((fast.cache.k, plain.cache.k), (fast.cache.v, plain.cache.v)):
        assert torch.equal(ours.float().isnan(), reference.float().isnan()), "the same places are written"
        torch.testing.assert_close(ours.float(), reference.float(), rtol=1e-3, atol=1e-3, equal_nan=True)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-block", "int4", "int4-zero-point", "int8"])
def test_quantised_weights_give_the_logits_of_the_plain_decoder(tmp_path: Path, scheme: str) -> None:
    heads = {"head_dim": 64, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"hidden_size": 64, "intermediate_size": 128, "tie_word_embeddings": True, **heads}
    model, config = load(tmp_path, Variant("qwen3", "Qwen3ForCausalLM", sizes), quantization=scheme)
    assert SingleTokenDecoder.supports(model)
    plain, fast = (PagedRunner.of(model, config, torch.float32, 1, 64, 8, None) for _ in range(2))
    for runner in (plain, fast):
        runner.step({0: random_tokens(12)[0]})
    fast.model = SingleTokenDecoder(model, fast.cache)
    for token in (7, 11):
        step = {0: np.array([token], dtype=np.int32)}
        expected, logits = plain.step(step)[0], fast.step(step)[0]
        # Our kernels do not round activations, which the plain int8 layers do.
        error = float((logits - expected).norm() / expected.norm())
        assert error < (0.05 if scheme == "int8" else 1e-4)


def test_a_quantiser_without_kernels_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    model, _ = load(tmp_path, Variant("llama", "LlamaForCausalLM", sizes), quantization="fp8")
    weight: Any = model.model.layers[0].mlp.down_proj.weight
    weight.quantizer = Unknown()
    assert not SingleTokenDecoder.supports(model)


class Unknown(Quantizer):
    """Of somebody else."""


class Doubling(Int8):
    """Multiplies in another way, which our kernels would not."""

    def linear(self, x: torch.Tensor, tensors: Tensors, bias: torch.Tensor | None) -> torch.Tensor:
        return 2.0 * super().linear(x, tensors, bias)


class OtherNames(Quantizer):
    """Numbers and scales under names of its own."""

    quantizes_embeddings = False

    def layout(self, columns: int) -> dict[str, Blocks]:
        return {"numbers": Blocks(1, 1, torch.int8), "factor": Blocks(1, 0, torch.float32)}

    def quantize(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        factor = weight.float().abs().amax(1, keepdim=True) / 127.0
        return {"numbers": (weight / factor).round().to(torch.int8), "factor": factor}


@pytest.mark.parametrize("own", [Doubling, OtherNames])
def test_a_quantiser_of_your_own_keeps_its_product(tmp_path: Path, own: type[Quantizer]) -> None:
    """Whether it derives from one of ours, or names its tensors in another way."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    variant = Variant("llama", "LlamaForCausalLM", sizes)
    model, _ = load(tmp_path, variant, quantization=f"{__name__}:{own.__name__}")
    assert not SingleTokenDecoder.supports(model)


def test_models_that_it_cannot_run_are_named(tmp_path: Path) -> None:
    moe, _ = load(tmp_path, Variant("moe", "Qwen3MoeForCausalLM", {"head_dim": 32}))
    odd, _ = load(tmp_path, Variant("odd", "LlamaForCausalLM", {"head_dim": 48}))
    assert not SingleTokenDecoder.supports(moe)
    assert not SingleTokenDecoder.supports(odd)
    assert not SingleTokenDecoder.supports(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("name", ["olmo3", "granite", "granite4", "gemma2", "gemma3", "glm4", "gpt-oss"])
def test_layers_that_are_not_plain_are_left_to_others(tmp_path: Path, name: str) -> None:
    """Norms in other places, factors, caps and sinks: the kernels know none of these, however much they are wanted."""
    variant = next(variant for variant in ARCHITECTURES if variant.name == name)
    model, _ = load(tmp_path, Variant(name, variant.architecture, {**variant.overrides, "head_dim": 32}))
    assert not SingleTokenDecoder.supports(model)


def test_a_norm_that_computes_something_else_is_left_to_others(tmp_path: Path) -> None:
    model, _ = load(tmp_path, Variant("llama", "LlamaForCausalLM", {"head_dim": 32}))
    assert SingleTokenDecoder.supports(model)
    model.model.norm.__class__ = GemmaNorm
    assert not SingleTokenDecoder.supports(model)


@pytest.mark.parametrize(("size", "width"), [(1, 1), (7, 5), (24, 1024), (9, 1500), (16, 2048)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_linear_kernel_fuses_norm_bias_gate_and_residual(size: int, width: int, gated: bool) -> None:
    generator = torch.Generator().manual_seed(size)
    rows = 2 * size if gated else size

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE)

    x, norm, weight, bias, residual = random(width), random(width), random(rows, width), random(rows), random(size)
    out = residual.clone()
    linear(x, weight, out, bias=bias, norm=norm, eps=1e-5, gated=gated, residual=out)
    normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.double(), 1e-5)
    expected = weight.double() @ normed + bias.double()
    if gated:
        gate, up = expected.chunk(2)
        expected = torch.nn.functional.silu(gate) * up
    expected += residual.double()
    assert ((out.double() - expected).norm() / expected.norm()).item() < 1e-5


def test_every_kernel_of_a_step_may_start_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step with one token has one row, however wide its vectors are: early launches are for few rows."""
    rows: list[int] = []

    def noted(tensor: torch.Tensor) -> dict[str, bool]:
        rows.append(len(tensor))
        return {"USE_PDL": False}

    for module in (single_token_linear, single_token_attention):
        monkeypatch.setattr(module, "pdl_launch_args", noted)
    model, config = load(tmp_path, VARIANTS[-1])
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=8, page_size=8)
    runner.model = SingleTokenDecoder(model, runner.cache)
    runner.step({0: np.array([7], dtype=np.int32)})
    assert rows == [1] * (6 * config.num_layers + 1)
