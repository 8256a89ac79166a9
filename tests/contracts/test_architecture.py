"""What every model architecture must fulfil: the scores of its original in transformers, and what an engine relies on.

Each is tried with a tiny random checkpoint. A class from outside must be called as its original in
transformers, such as ``GraniteForCausalLM``.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.layers.rotary import Rotary
from minisgl.models.config import MODELS, Architecture, ModelConfig
from minisgl.models.loader import load_model
from minisgl.registry import resolve
from tests.model_zoo import hf_logits, random_tokens, run_dense, tiny_checkpoint
from tests.paged_runner import PagedRunner

CONTRACTS = {"architecture": (MODELS, Architecture)}

CPU = torch.device("cpu")
TOLERANCE = 1e-4


@pytest.fixture
def architecture(request: pytest.FixtureRequest) -> str:
    """A name in `MODELS`, or ``"module:Class"``."""
    name: str = request.param
    return name


@pytest.fixture
def original(architecture: str, tmp_path: Path) -> tuple[Path, PreTrainedModel]:
    ours = {path: name for name, path in MODELS.items()}
    return tiny_checkpoint(tmp_path, ours.get(architecture, architecture.rpartition(":")[2]))


@pytest.fixture
def config(architecture: str, original: tuple[Path, PreTrainedModel]) -> ModelConfig:
    return ModelConfig.from_dir(original[0], architecture)


@pytest.fixture
def model(original: tuple[Path, PreTrainedModel], config: ModelConfig) -> torch.nn.Module:
    return load_model(original[0], config, torch.float32, CPU)


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return float((one - other).abs().max())


def test_scores_of_whole_prompts(original: tuple[Path, PreTrainedModel], model: torch.nn.Module) -> None:
    prompts = random_tokens(23, 1, 9)
    for prompt, scores in zip(prompts, run_dense(model, *prompts), strict=True):
        assert apart(scores, hf_logits(original[1], prompt)) < TOLERANCE


def test_scores_of_a_prompt_in_chunks(
    original: tuple[Path, PreTrainedModel], config: ModelConfig, model: torch.nn.Module
) -> None:
    (prompt,) = random_tokens(20)
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=20, page_size=4)
    chunks = [runner.step({0: chunk})[0] for chunk in (prompt[:9], prompt[9:19], prompt[19:])]
    assert apart(torch.cat(chunks), hf_logits(original[1], prompt)) < TOLERANCE


def test_rows_of_a_batch_do_not_see_each_other(model: torch.nn.Module) -> None:
    first, second = random_tokens(12, 7)
    assert apart(run_dense(model, first, second)[1], run_dense(model, second)[0]) < TOLERANCE


def test_built_on_the_meta_device_it_takes_no_memory(architecture: str, config: ModelConfig) -> None:
    with torch.device("meta"):
        built = resolve("architecture", architecture, MODELS)(config)
    assert all(parameter.is_meta for parameter in built.parameters())
    tables = [module.table for module in built.modules() if isinstance(module, Rotary)]
    assert tables
    assert not any(table.is_meta for table in tables)
