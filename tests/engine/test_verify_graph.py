"""Steps that verify drafts go to a graph of their own, with rows that have fewer drafts, or none, beside others."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.verify_graph import VerifyGraphRunner, build_verify_runner, measure_verify_memory, rows_to_verify
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.drafting import KnowsTheAnswers, draft_always, drafts_of
from tests.model_zoo import tiny_checkpoint

PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 4 + [1, 2], [9], list(range(20, 46)), [3] * 7]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=7),
    SamplingParams(temperature=0.8, seed=4, max_tokens=6),
    SamplingParams(temperature=0.0, max_tokens=9, logprobs=2, num_draft_tokens=1),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=5, num_draft_tokens=0),
    SamplingParams(temperature=0.0, max_tokens=8, repetition_penalty=1.2),
]
DRAFTS = 3


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "MistralForCausalLM"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(directory, request.param, head_dim=32, vocab_size=64, num_hidden_layers=1)[0]


def engine(path: Path, **options: Any) -> LLM:
    ours: dict[str, Any] = {"prefill_attention": "cascade", "decode_attention": "cascade", "num_draft_tokens": DRAFTS}
    sizes: dict[str, Any] = {"num_pages": 48, "page_size": 4, "max_running_requests": 4}
    return LLM(path, device="cpu", dtype="float32", **{**ours, **sizes, **options})


def test_the_tokens_are_those_of_an_engine_without_drafts(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [output.token_ids for output in engine(path).generate(PROMPTS, PARAMS)]
    monkeypatch.setattr(KnowsTheAnswers, "answers", [a + b for a, b in zip(PROMPTS, expected, strict=True)])
    llm = draft_always(engine(path, drafter="tests.drafting:KnowsTheAnswers"))
    llm.engine.kv_cache.k[:, :-1].fill_(torch.nan)  # pages that nobody has written
    runner = VerifyGraphRunner(llm.engine.runner, (1, 2, 3), DRAFTS + 1, CpuGraph)  # none for four rows
    llm.engine.runner = CudaGraphRunner(runner, (2, 4), CpuGraph)
    steps: Counter[tuple[bool, int | None, bool]] = Counter()
    size_for, keys = runner.size_for, []
    plan = runner.attention.plan

    def watched(batch: Batch) -> int | None:
        steps[len(batch.drafts) > 0, size_for(batch), batch.num_decode > 0] += 1
        return size_for(batch)

    def planned(batch: Batch, inputs: Any) -> Any:
        key = plan(batch, inputs)
        if inputs.padded:
            keys.append((len(inputs.positions), key))
        return key

    with patch.object(runner, "size_for", watched), patch.object(runner.attention, "plan", planned):
        assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    drafted, accepted = drafts_of(llm)
    assert 0 < accepted < drafted
    assert all((size is None) or drafts for drafts, size, _ in steps), "steps without drafts have other graphs"
    assert {size for drafts, size, _ in steps if drafts} >= {8, 12, None}
    assert any(drafts and size and beside for drafts, size, beside in steps), "a row without drafts beside others"
    assert keys
    assert set(keys) <= runner.graphs.keys(), "each was replayed"


@torch.inference_mode()
def test_many_rows_of_few_tokens_have_room(path: Path) -> None:
    """As many tiles as rows, where a prefill graph of as many tokens has room for fewer."""
    llm = engine(path, max_running_requests=24)
    runner = VerifyGraphRunner(llm.engine.runner, (24,), 2, CpuGraph)
    buffers = runner.buffers[48]
    (first, *_) = runner.dummy_steps(buffers)
    buffers.load(torch.from_numpy(buffers.pack(first)))
    assert (48, runner.attention.plan(first, buffers.inputs)) in runner.graphs
    assert np.array_equal(buffers.inputs.logit_rows.numpy()[:24], first.logit_rows)


def test_what_can_be_captured(path: Path) -> None:
    runner = engine(path).engine.runner
    config = EngineConfig(drafter="ngram", max_running_requests=256)
    assert rows_to_verify(config, runner) == (), "there is no CUDA"
    assert build_verify_runner(config, runner, CpuGraph) is runner
    torch_runner = engine(path, prefill_attention="torch", decode_attention="torch").engine.runner
    with patch.object(ModelRunner, "device", torch.device("cuda")):
        assert rows_to_verify(config, runner)[:3] == (1, 2, 4)
        assert rows_to_verify(config, runner)[-1] == 128
        assert rows_to_verify(EngineConfig(), runner) == ()
        assert measure_verify_memory(EngineConfig(), runner) == 0
        assert rows_to_verify(EngineConfig(drafter="ngram", enforce_eager=True), runner) == ()
        assert rows_to_verify(config, torch_runner) == ()
