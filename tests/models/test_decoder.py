from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from minisgl.core import ForwardContext, forward_context
from minisgl.layers import DenseAttention, PackedWeights
from minisgl.models import ModelConfig, load_model
from tests.model_zoo import tiny_checkpoint
from tests.steps import step_of


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
