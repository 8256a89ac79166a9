"""Gemma in an engine, and in other sizes than those of the contract suite."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from minisgl.llm import LLM
from minisgl.models.config import MODELS, Architecture, ModelConfig
from minisgl.models.loader import load_model
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import hf_logits, random_tokens, run_dense, tiny_checkpoint

CONTRACTS = {"implementation": (MODELS, Architecture)}


@pytest.fixture
def implementation(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def answer(model: PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """Greedy, with the whole sequence computed anew for every token."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(hf_logits(model, tokens)[-1].argmax()))
    return tokens[len(prompt) :]


class TestEngine:
    def test_answers_are_those_of_transformers(self, implementation: str, tmp_path: Path) -> None:
        """Chunks, a shared prefix, and more requests than the pages hold at once."""
        path, original = tiny_checkpoint(tmp_path, "GemmaForCausalLM")
        (common,) = random_tokens(17)
        prompts = [[*common.tolist(), *own.tolist()] for own in random_tokens(3, 9, 6, 1, seed=1)]
        llm = LLM(
            path,
            architecture=implementation,
            device="cpu",
            num_pages=16,
            page_size=4,
            max_prefill_tokens=8,
            max_running_requests=4,
        )
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=8))
        for number, (output, prompt) in enumerate(zip(outputs, prompts, strict=True)):
            wanted = answer(original, prompt, 8)
            assert output.token_ids == wanted, (
                f"prompt {number} is answered with {output.token_ids}, and by transformers with {wanted}: first make "
                "tests/contracts/test_architecture.py pass, which compares logits"
            )


class TestOtherSizes:
    @pytest.mark.parametrize(
        "overrides",
        [
            {"tie_word_embeddings": True},
            {"num_key_value_heads": 1, "head_dim": 16},
            {"hidden_size": 48, "num_hidden_layers": 3, "rms_norm_eps": 1e-2},
        ],
    )
    def test_scores_of_whole_prompts(self, implementation: str, tmp_path: Path, overrides: dict[str, Any]) -> None:
        path, original = tiny_checkpoint(tmp_path, "GemmaForCausalLM", **overrides)
        model = load_model(path, ModelConfig.from_dir(path, implementation), torch.float32, torch.device("cpu"))
        for prompt in random_tokens(23, 2):
            error = float((run_dense(model, prompt)[0] - hf_logits(original, prompt)).abs().max())
            assert error < 1e-4, (
                f"logits differ by up to {error:g} from those of transformers with {overrides}: take these sizes from "
                "the config that your class is given, and leave the tied LM head without the embedding's factor"
            )
