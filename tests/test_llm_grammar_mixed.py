"""Structured output beside everything else: other requests, overlap, graphs, preemption, streams, aborts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar

import jsonschema
import pytest

from minisgl import LLM, SamplingParams
from minisgl.engine.sampler import DefaultSampler
from minisgl.graphs import CpuGraph, CudaGraphRunner
from tests.structured import CAT, DATE, PERSON, SCHEMA, make, tokens
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("grammar"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def shared_llm(path: Path) -> LLM:
    return make(path, overlap=True)


@pytest.fixture
def llm(shared_llm: LLM) -> LLM:
    assert_idle_and_clean(shared_llm)
    return shared_llm


MIXED = [
    SamplingParams(max_tokens=90, json_schema=SCHEMA, seed=1, n=2),
    SamplingParams(max_tokens=25, temperature=0.8, top_p=0.9, seed=2),
    SamplingParams(max_tokens=30, regex=DATE, top_k=3, seed=3),
    SamplingParams(max_tokens=30, temperature=0.0, logprobs=2),
    SamplingParams(max_tokens=30, regex="[a-e]+(,[a-e]+){3}", repetition_penalty=1.5, logprobs=3, seed=4),
    SamplingParams(max_tokens=40, temperature=0.0, regex="[0-9 ]{8,}", presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(max_tokens=20, min_p=0.05, seed=5, stop=["e", " "]),
    SamplingParams(max_tokens=30, regex=".{2,}", min_tokens=4, logit_bias={20: 4.0}, min_p=0.02, seed=6),
    SamplingParams(max_tokens=12, json_schema='{"type": "array"}', seed=7),
]
PROMPTS = [[7, 8, 9] * 3 + [i] * (1 + i % 4) for i in range(len(MIXED))]
TIGHT: dict[str, Any] = {"num_pages": 32, "max_prefill_tokens": 8, "max_running_requests": 4}


def test_overlap_chunks_and_preemption_give_the_same_tokens(path: Path) -> None:
    """Every way to sample, with and without a grammar, in an engine that has too little of everything."""
    expected = None
    for options in ({}, {**TIGHT, "overlap": False}, {**TIGHT, "overlap": True}, {**TIGHT, "batch_policy": "mixed"}):
        llm = make(path, **options)
        outputs = llm.generate(PROMPTS, MIXED)
        assert_idle_and_clean(llm)
        answers = [(c.token_ids, c.text, c.finish_reason) for output in outputs for c in output.completions]
        expected = expected or answers
        assert answers == expected
        assert (sum(output.metrics.preemptions for output in outputs) > 0) == bool(options)
    first, second = (json.loads(completion.text) for completion in outputs[0].completions)
    assert first != second, "each completion follows the grammar by itself"


def test_requests_without_a_grammar_do_not_notice_those_with_one(path: Path) -> None:
    free = [i for i, params in enumerate(MIXED) if params.regex is None and params.json_schema is None]
    for overlap in (False, True):
        llm = make(path, overlap=overlap)
        alone = llm.generate([PROMPTS[i] for i in free], [MIXED[i] for i in free])
        together = llm.generate(PROMPTS, MIXED)
        assert tokens([together[i] for i in free]) == tokens(alone)


@pytest.mark.parametrize("sampler", ["default", "triton"])
def test_a_step_replayed_from_a_graph_obeys_its_masks(path: Path, sampler: str) -> None:
    """The graph has sampled without them already; the token table must hold what was sampled with them."""
    llm = make(path, sampler=sampler)
    replayed = make(path, sampler=sampler, overlap=True)
    replayed.engine.runner = CudaGraphRunner(replayed.engine.runner, (1, 2, 4), CpuGraph)
    params = [
        SamplingParams(max_tokens=7, seed=1),
        SamplingParams(regex=DATE, seed=2),
        SamplingParams(regex="x|[ab]+", seed=3),
    ]
    assert tokens(replayed.generate(PROMPTS[:3], params)) == tokens(llm.generate(PROMPTS[:3], params))


class Watching(DefaultSampler):
    sampled: ClassVar[list[bool]] = []

    def _adjust(self, logits: Any, inputs: Any, history: Any) -> Any:
        self.sampled.append(inputs.constraint is not None)
        return super()._adjust(logits, inputs, history)


def test_masks_are_made_for_the_steps_that_need_them(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampled: list[bool] = []
    monkeypatch.setattr(Watching, "sampled", sampled)
    llm = make(path, sampler=f"{__name__}:Watching")
    llm.generate(CAT, SamplingParams(temperature=0.0, max_tokens=5))
    assert sampled == [False] * 5
    sampled.clear()
    llm.generate([CAT] * 2, [SamplingParams(temperature=0.0, max_tokens=9), SamplingParams(regex="x{3}", seed=1)])
    assert sampled == [True] * 3 + [False] * 6


def test_streamed_text_is_the_whole_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=3)
    deltas = list(llm.stream(CAT, params))
    text = "".join(delta.text for delta in deltas)
    assert text == llm.generate(CAT, params)[0].text
    assert deltas[-1].finish_reason == "stop"
    jsonschema.validate(json.loads(text), PERSON)


def test_an_abort_in_the_middle_of_a_grammar(llm: LLM) -> None:
    params = SamplingParams(max_tokens=400, json_schema=SCHEMA, seed=3)
    expected = llm.generate(CAT, params)[0].token_ids
    for steps in (0, 1, 2, 5):
        (aborted,), (other,) = llm.prepare(CAT, params), llm.prepare(CAT, params)
        for generation in (aborted, other):
            llm.submit(generation)
        for _ in range(steps):
            llm.step()
        llm.abort(aborted)
        while llm.scheduler.has_work:
            llm.step()
        assert other.completion().token_ids == expected
        assert_idle_and_clean(llm)


def test_logprobs_are_of_the_model_and_not_of_the_grammar(llm: LLM) -> None:
    free = llm.generate(CAT, SamplingParams(temperature=0.0, max_tokens=1, logprobs=1))[0]
    forced = llm.generate(CAT, SamplingParams(temperature=0.0, regex="[0-9]", logprobs=1))[0]
    assert free.logprobs is not None
    assert forced.logprobs is not None
    assert forced.logprobs[0].top == free.logprobs[0].top
    assert forced.logprobs[0].logprob < free.logprobs[0].logprob
