"""Draft models and EAGLE heads on a CUDA device: steps of their own in CUDA graphs, the same answers, memory freed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from minisgl.drafters.sequences import DraftSequences
from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.drafting import draft_always, drafts_of
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint
from tools.drafter_head import Head, HeadConfig, save

pytestmark = pytest.mark.gpu

PROMPTS = [[7, 8, 9] * 3 + [i] * (1 + i % 40) for i in range(12)]
PARAMS = [
    SamplingParams(temperature=0.0 if i % 2 else 1.0, seed=i, max_tokens=20 + 5 * i, ignore_eos=True) for i in range(12)
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes: dict[str, Any] = {"head_dim": 32, "initializer_range": 0.2}
    path = text_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=4, **sizes)
    smaller = text_checkpoint(tmp_path_factory.mktemp("smaller"), num_hidden_layers=1, **sizes)
    head = tmp_path_factory.mktemp("head")
    torch.manual_seed(0)
    save(Head(AutoConfig.from_pretrained(path), HeadConfig(120, 40)), torch.arange(120), head)
    return {"target": path, "model": smaller, "eagle": head}


def make(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cuda", dtype="float32", max_running_requests=16, max_seq_len=256, **options)


def sequences_of(llm: LLM) -> DraftSequences:
    assert llm.scheduler.speculation is not None
    sequences: DraftSequences = llm.scheduler.speculation._drafter.sequences
    return sequences


@pytest.mark.parametrize("drafter", ["model", "eagle"])
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_the_answers_are_those_without_drafts(paths: dict[str, Path], drafter: str, enforce_eager: bool) -> None:
    with make(paths["target"]) as plain:
        expected = [output.token_ids for output in plain.generate(PROMPTS, PARAMS)]
    options = {"drafter": drafter, "draft_model": str(paths[drafter]), "enforce_eager": enforce_eager}
    with make(paths["target"], **options) as llm:
        draft_always(llm)
        for _ in range(2):
            assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
        assert_idle_and_clean(llm)
        assert drafts_of(llm)[0] > 500
        assert not llm.scheduler.speculation._off
        sequences = sequences_of(llm)
        assert sequences.pool.num_free == sequences.pool.num_pages
        assert isinstance(sequences.engine.runner, CudaGraphRunner) == (not enforce_eager)


def test_graphs_and_eager_steps_guess_the_same(paths: dict[str, Path]) -> None:
    """Of a head too, whose steps hand a hidden state on; and a model that drafts for itself is nearly always right."""
    for drafter, draft_model in (("eagle", "eagle"), ("model", "target")):
        seen = []
        for enforce_eager in (False, True):
            options = {"drafter": drafter, "draft_model": str(paths[draft_model]), "enforce_eager": enforce_eager}
            with make(paths["target"], **options) as llm:
                draft_always(llm)
                llm.generate(PROMPTS, PARAMS)
                seen.append(drafts_of(llm))
        (drafted, accepted), (drafted_eagerly, accepted_eagerly) = seen
        # Ties between logits may fall either way; a graph that read the wrong states would lose most.
        assert abs(accepted - accepted_eagerly) <= 0.03 * drafted
        assert abs(drafted - drafted_eagerly) <= 0.03 * drafted
        if drafter == "model":
            greedy = PARAMS[1::2]
            with make(paths["target"], drafter="model", draft_model=str(paths["target"])) as llm:
                draft_always(llm)
                llm.generate(PROMPTS[1::2], greedy)
                drafted, accepted = drafts_of(llm)
                assert accepted >= 0.98 * drafted


def test_a_closed_engine_frees_its_drafters_memory(paths: dict[str, Path]) -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    for drafter in ("model", "eagle"):
        llm = make(paths["target"], num_pages=2000, drafter=drafter, draft_model=str(paths[drafter]))
        llm.generate(PROMPTS[0], PARAMS[0])
        assert torch.cuda.memory_allocated() > before + 10_000_000
        llm.close()
        assert torch.cuda.memory_allocated() < before + 2_000_000
