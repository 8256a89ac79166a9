"""Overlap scheduling through the offline API: the same answers, and nothing left in flight, whatever ends a request."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from minisgl.llm import LLM
from minisgl.outputs import Delta
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import Failing, Scripted, assert_idle_and_clean, directed_llm, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
PROMPTS = [[i + 1] * (3 + i) for i in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("overlap"))


def make(path: Path, **options: Any) -> LLM:
    sizes = {"page_size": 4, "num_pages": 64, "dtype": "float64", "device": "cpu", "max_running_requests": 4}
    return directed_llm(path, **{**sizes, "overlap": True, **options})


@pytest.fixture
def llm(path: Path) -> LLM:
    return make(path)


def test_the_option_chooses_how_many_steps_stay_in_flight(path: Path) -> None:
    depths = [make(path, overlap=overlap).loop.depth for overlap in (True, False, None)]
    assert depths == [1, 0, 0]  # a CPU gains nothing from it


def test_every_way_to_sample_gives_the_same_tokens(path: Path) -> None:
    """More requests than slots, and more tokens than pages: rows change all the time, and requests are preempted."""
    params = [
        SamplingParams(temperature=0.0, max_tokens=20, logprobs=2),
        SamplingParams(temperature=1.0, max_tokens=15, seed=1, n=2),
        SamplingParams(temperature=0.8, top_k=20, top_p=0.9, max_tokens=18, seed=2),
        SamplingParams(temperature=1.0, min_p=0.05, repetition_penalty=1.3, max_tokens=12, seed=3),
        SamplingParams(temperature=1.0, presence_penalty=0.7, frequency_penalty=0.3, max_tokens=16, seed=4),
        SamplingParams(temperature=1.0, max_tokens=1, seed=5),
        SamplingParams(temperature=1.2, max_tokens=20, min_tokens=5, stop_token_ids=list(range(0, 300, 5)), seed=6),
        SamplingParams(temperature=1.0, max_tokens=20, seed=7, logit_bias={9: 3.0}, stop=["e", " "]),
        SamplingParams(temperature=1.0, max_tokens=20),
    ]
    prompts = [[7, 8, 9] * 3 + [i] * (1 + i % 4) for i in range(len(params))]
    answers, logprobs = [], []
    for overlap in (False, True):
        llm = make(path, overlap=overlap, num_pages=16, max_prefill_tokens=8)
        outputs = llm.generate(prompts, params)
        assert_idle_and_clean(llm)
        assert sum(output.metrics.preemptions for output in outputs) > 0
        completions = [completion for output in outputs for completion in output.completions]
        answers.append([(c.token_ids, c.text, c.finish_reason) for c in completions])
        logprobs.append([pair for entry in outputs[0].logprobs or () for pair in entry.top])
    assert answers[0] == answers[1]
    assert {reason for _, _, reason in answers[0]} == {"length", "stop"}
    assert len(logprobs[0]) == 2 * 20
    assert np.allclose(logprobs[0], logprobs[1], atol=1e-9)


def test_one_token_and_end_tokens(path: Path, tmp_path: Path, llm: LLM) -> None:
    tokens = llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert [o.token_ids for o in llm.generate([PROMPTS[0]] * 3, one)] == [tokens[:1]] * 3
    assert_idle_and_clean(llm)
    ending = make(text_checkpoint(tmp_path, eos=[tokens[3]]))
    output = ending.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=8))[0]
    assert output.token_ids == tokens[: tokens.index(tokens[3]) + 1]
    assert output.finish_reason == "stop"
    assert_idle_and_clean(ending)


def test_a_stop_string_is_found_one_step_late_and_nothing_follows_it(llm: LLM) -> None:
    tokens = llm.tokenizer.encode("the cat and the dog")
    executor = Scripted(tokens)
    llm.executor.launcher = executor
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True, stop=" and")
    output = llm.generate("12 of them", params)[0]
    assert (output.text, output.finish_reason) == ("the cat", "stop")
    assert len(output.token_ids) < len(tokens)
    assert output.token_ids == tokens[: len(output.token_ids)]
    assert_idle_and_clean(llm)
    deltas = list(llm.stream("12 of them", params))
    assert "".join(delta.text for delta in deltas) == "the cat"
    assert [token for delta in deltas for token in delta.token_ids] == output.token_ids
    assert_idle_and_clean(llm)


def test_a_closed_stream_leaves_nothing_in_flight(llm: LLM) -> None:
    for taken in range(4):
        stream = llm.stream(PROMPTS[0], LONG)
        for _ in range(taken):
            next(stream)
        stream.close()
        assert_idle_and_clean(llm)


def test_an_abort_in_flight_spares_the_others(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY)]
    for steps in range(5):
        first, *others = [llm.prepare(prompt, GREEDY)[0] for prompt in PROMPTS[:3]]
        for generation in (first, *others):
            llm.submit(generation)
        for _ in range(steps):
            llm.step()
        llm.abort(first)
        seen = list(first.request.output)
        while llm.scheduler.has_work:
            llm.step()
        assert first.finished
        assert first.completion().finish_reason == "abort"
        assert first.request.output == seen == expected[0][: len(seen)]
        assert [other.completion().token_ids for other in others] == expected[1:]
        assert_idle_and_clean(llm)


def test_streams_beside_each_other(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS[:3], GREEDY)]
    streams = [llm.stream(prompt, GREEDY) for prompt in PROMPTS[:3]]
    deltas: list[list[Delta]] = [[] for _ in streams]
    for turn in itertools.zip_longest(*streams):
        for got, delta in zip(deltas, turn, strict=True):
            got += [] if delta is None else [delta]
    assert [[token for delta in got for token in delta.token_ids] for got in deltas] == expected
    assert_idle_and_clean(llm)


def test_the_time_limit_of_a_request_in_flight(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1e-6)
    skipped = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) + skipped)
    llm = make(path, request_timeout=30.0)
    stream = llm.stream(PROMPTS[0], LONG)
    next(stream)
    skipped = 31.0
    last = list(stream)[-1]
    assert last.finish_reason == "error"
    assert "time limit" in (last.error or "")
    assert_idle_and_clean(llm)


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("step", [0, 1, 2, 5, 9, 12])
def test_a_failed_step_ends_its_requests_and_the_engine_goes_on(llm: LLM, step: int, late: bool) -> None:
    """``late``: not the launch raises, but the wait, when the next step has been launched already."""
    expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    llm.scheduler.memory.forget_unlocked()
    llm.executor.launcher = Failing(llm.engine, step, RuntimeError("out of memory"), late)
    outputs = llm.generate(PROMPTS, GREEDY)
    failed = [output.finish_reason == "error" for output in outputs]
    assert 0 < sum(failed) <= 4
    for output, tokens in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens[: len(output.token_ids)]
        if output.finish_reason == "error":
            assert output.error == "the step failed: RuntimeError: out of memory"
        else:
            assert output.token_ids == tokens
    assert_idle_and_clean(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_a_serviceable_engine(
    llm: LLM, step: int, interrupt: type[BaseException], late: bool
) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    stream = llm.stream([9] * 3, LONG)
    next(stream)
    llm.executor.launcher = Failing(llm.engine, step, interrupt(), late)
    with pytest.raises(interrupt):
        llm.generate(PROMPTS, GREEDY)
    last = list(stream)[-1]
    assert (last.finish_reason, last.error) in (("error", "interrupted"), ("length", None))
    assert_idle_and_clean(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected
