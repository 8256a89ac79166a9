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


def assert_same(scores: torch.Tensor, wanted: torch.Tensor, of_what: str, advice: str = "") -> None:
    """Fail with a sentence that says which token is the first with other scores, and where to look for the reason."""
    assert scores.shape == wanted.shape, f"logits {of_what}: shape {[*scores.shape]} instead of {[*wanted.shape]}"
    errors = (scores - wanted).abs().amax(-1)
    wrong = (~(errors < TOLERANCE)).nonzero().flatten()
    if len(wrong) == 0:
        return
    place = int(wrong[0])
    reason = advice or (_SEES_OTHERS if place else _SEES_ITSELF)
    raise AssertionError(f"logits {of_what} are wrong from token {place} on, by up to {errors.max():g}. {reason}")


_SEES_ITSELF = (
    "Token 0 sees only itself and is not rotated, so look at the embedding, the norms, the biases and the MLP, with a "
    "model that is one layer deep."
)
_SEES_OTHERS = (
    "The tokens before it are right, so look at what makes a token see others: rotation, windows, and the scale of "
    "attention."
)
_SEES_PAGES = (
    "Where whole prompts are right, a layer keeps something from step to step, or takes a token's place in the step "
    "for its position: leave what is kept to self_attn, and use the rotation that it is given."
)
_SEES_NEIGHBOURS = (
    "Another row is beside it in the step: compute each token for itself, and let attention alone mix them."
)


def test_scores_of_whole_prompts(original: tuple[Path, PreTrainedModel], model: torch.nn.Module) -> None:
    prompts = random_tokens(23, 1, 9)
    for prompt, scores in zip(prompts, run_dense(model, *prompts), strict=True):
        assert_same(scores, hf_logits(original[1], prompt), f"of a prompt of {len(prompt)} tokens")


def test_scores_of_a_prompt_in_chunks(
    original: tuple[Path, PreTrainedModel], config: ModelConfig, model: torch.nn.Module
) -> None:
    (prompt,) = random_tokens(20)
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=20, page_size=4)
    chunks = [runner.step({0: chunk})[0] for chunk in (prompt[:9], prompt[9:19], prompt[19:])]
    assert_same(torch.cat(chunks), hf_logits(original[1], prompt), "of a prompt in three chunks", _SEES_PAGES)


def test_rows_of_a_batch_do_not_see_each_other(model: torch.nn.Module) -> None:
    first, second = random_tokens(12, 7)
    beside, alone = run_dense(model, first, second)[1], run_dense(model, second)[0]
    assert_same(beside, alone, "of a row", _SEES_NEIGHBOURS)


def test_built_on_the_meta_device_it_takes_no_memory(architecture: str, config: ModelConfig) -> None:
    with torch.device("meta"):
        built = resolve("architecture", architecture, MODELS)(config)
    filled = [name for name, parameter in built.named_parameters() if not parameter.is_meta]
    assert not filled, f"{filled} take memory before weights are loaded: make them without a device and without values"
    tables = [module.table for module in built.modules() if isinstance(module, Rotary)]
    assert tables, "there is no minisgl.layers.rotary.Rotary in the model: the engine relies on its tables"
    message = "the tables of Rotary are computed, not loaded: nothing would ever fill them on the meta device"
    assert not any(table.is_meta for table in tables), message
