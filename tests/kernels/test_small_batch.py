"""The decoder for small batches against the plain one, and its linear kernel against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from minisgl.kernels.small_batch import SmallBatchDecoder
from minisgl.kernels.small_batch_linear import linear
from tests.kernels.loading import DEVICE, load
from tests.model_zoo import PagedRunner, Variant, random_tokens

VARIANTS = [
    Variant("llama-biases", "LlamaForCausalLM", {"attention_bias": True, "mlp_bias": True}),
    Variant("mistral-window", "MistralForCausalLM", {"sliding_window": 9}),
    Variant("qwen2-tied", "Qwen2ForCausalLM", {"tie_word_embeddings": True}),
    Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 40, "head_dim": 16}),
]


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
def test_steps_give_the_logits_of_the_plain_decoder(tmp_path: Path, variant: Variant) -> None:
    model, config = load(tmp_path, variant)
    prompts = random_tokens(30, 1, 17)
    runners = [PagedRunner.of(model, config, torch.float32, rows=3, max_len=40, page_size=8) for _ in range(2)]
    for runner in runners:
        runner.step(dict(enumerate(prompts)))
    plain, fast = runners
    assert SmallBatchDecoder.supports(model)
    fast.model = SmallBatchDecoder(model)  # type: ignore[assignment]
    for token in (7, 8):
        step = {slot: np.array([token + slot], dtype=np.int32) for slot in range(3)}
        for expected, logits in zip(plain.step(step), fast.step(step), strict=True):
            torch.testing.assert_close(logits, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(fast.cache.k, plain.cache.k, rtol=1e-3, atol=1e-3, equal_nan=True)
    torch.testing.assert_close(fast.cache.v, plain.cache.v, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_models_that_it_cannot_run_are_named(tmp_path: Path) -> None:
    moe, _ = load(tmp_path, Variant("moe", "Qwen3MoeForCausalLM"))
    double, _ = load(tmp_path, Variant("double", "LlamaForCausalLM"), torch.float64)
    assert not SmallBatchDecoder.supports(moe)
    assert not SmallBatchDecoder.supports(double)
    assert not SmallBatchDecoder.supports(torch.nn.Linear(2, 2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("rows", "size", "width"), [(1, 1, 1), (3, 7, 5), (17, 40, 300), (70, 33, 128)])
@pytest.mark.parametrize("gated", [False, True])
def test_the_linear_kernel_fuses_norm_bias_gate_and_residual(
    rows: int, size: int, width: int, gated: bool, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(DEVICE, dtype)

    outputs = 2 * size if gated else size
    x, norm, weight, bias = random(rows, width), random(width), random(outputs, width), random(outputs)
    residual = random(rows, size)
    normed = torch.nn.functional.rms_norm(x.double(), (width,), norm.double(), 1e-5)
    expected = normed @ weight.double().T + bias.double()
    if gated:
        gate, up = expected.chunk(2, dim=-1)
        expected = torch.nn.functional.silu(gate) * up
    expected += residual.double()
    out = linear(x, weight, bias=bias, norm=norm, eps=1e-5, gated=gated, residual=residual)
    assert out is residual
    assert ((out.double() - expected).norm() / expected.norm()).item() < tolerance


def test_the_plain_product() -> None:
    x, weight = torch.randn(5, 20, device=DEVICE), torch.randn(9, 20, device=DEVICE)
    torch.testing.assert_close(linear(x, weight), x @ weight.T, rtol=1e-5, atol=1e-5)
