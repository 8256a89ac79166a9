from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl.layers import Linear
from minisgl.models import CausalLM, ModelConfig, block_weights, load_model
from tests.model_zoo import ARCHITECTURES, Variant, random_tokens, run_dense


def load(path: Path, dtype: torch.dtype = torch.float32) -> CausalLM:
    model = load_model(path, ModelConfig.from_dir(path), dtype, torch.device("cpu"))
    assert isinstance(model, CausalLM)
    return model


@pytest.mark.parametrize("variant", ARCHITECTURES, ids=lambda variant: variant.name)
def test_a_model_computes_the_same_with_blocked_weights(tmp_path: Path, variant: Variant) -> None:
    path, _ = variant.checkpoint(tmp_path)
    model, tokens = load(path), random_tokens(31, 1)
    expected = run_dense(model, *tokens)
    block_weights(model)
    assert all(module.weight.is_mkldnn for module in model.modules() if isinstance(module, Linear))
    for logits, before in zip(run_dense(model, *tokens), expected, strict=True):
        torch.testing.assert_close(logits, before, atol=1e-4, rtol=0)


def test_a_tied_head_gets_its_own_weight_and_nothing_else_grows(tmp_path: Path) -> None:
    path, _ = ARCHITECTURES[1].checkpoint(tmp_path)
    model = load(path)
    table = model.model.embed_tokens.weight
    size = sum(parameter.numel() for parameter in model.parameters())
    block_weights(model)
    assert model.lm_head is not None
    assert torch.equal(model.lm_head.weight.to_dense(), table)
    assert model.model.embed_tokens.weight is table
    assert sum(parameter.numel() for parameter in model.parameters()) == size + table.numel()


def test_a_dtype_without_a_blocked_layout_is_left_alone(tmp_path: Path) -> None:
    path, _ = ARCHITECTURES[1].checkpoint(tmp_path)
    model = load(path, torch.float64)
    before = [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()]
    block_weights(model)
    assert [(name, parameter.data_ptr()) for name, parameter in model.named_parameters()] == before
