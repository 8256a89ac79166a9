"""When a step fails: its requests end with an error, everybody else is served, and nothing is lost for later."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest

from minisgl.errors import QueueFull
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import Failing, assert_idle_and_clean, directed_llm, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
PROMPTS = [[i + 1] * (3 + i) for i in range(6)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("failures"))


@pytest.fixture
def llm(path: Path) -> LLM:
    return directed_llm(path, page_size=4, num_pages=64, dtype="float64", max_running_requests=4)


@pytest.fixture
def expected(llm: LLM) -> list[list[int]]:
    answers = [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]
    llm.scheduler.memory.forget_unlocked()
    return answers


@pytest.mark.parametrize("step", [0, 1, 3, 9, 12])
def test_an_exception_ends_the_requests_of_its_step_only(llm: LLM, expected: list[list[int]], step: int) -> None:
    llm.executor.launcher = Failing(llm.engine, step, RuntimeError("out of memory"))
    outputs = llm.generate(PROMPTS, GREEDY)
    failed = [output.finish_reason == "error" for output in outputs]
    assert 0 < sum(failed) <= 4
    for output, tokens in zip(outputs, expected, strict=True):
        if output.finish_reason == "error":
            assert output.error == "the step failed: RuntimeError: out of memory"
            assert output.token_ids == tokens[: len(output.token_ids)]
        else:
            assert output.token_ids == tokens
    assert_idle_and_clean(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


@pytest.mark.parametrize("step", [0, 1, 5])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_leaves_a_serviceable_engine(
    llm: LLM, expected: list[list[int]], step: int, interrupt: type[BaseException]
) -> None:
    llm.executor.launcher = Failing(llm.engine, step, interrupt())
    with pytest.raises(interrupt):
        llm.generate(PROMPTS, GREEDY)
    assert_idle_and_clean(llm)
    assert [output.token_ids for output in llm.generate(PROMPTS, GREEDY)] == expected


def test_an_interrupt_of_one_call_ends_an_open_stream_with_an_error(llm: LLM) -> None:
    stream = llm.stream([9] * 3, SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True))
    next(stream)
    llm.executor.launcher = Failing(llm.engine, 1, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([8] * 3, GREEDY)
    last = list(stream)[-1]
    assert (last.finish_reason, last.error) == ("error", "interrupted")
    assert_idle_and_clean(llm)


def test_a_failing_step_ends_a_stream_with_an_error(llm: LLM) -> None:
    llm.executor.launcher = Failing(llm.engine, 2, ValueError("broken"))
    deltas = list(llm.stream(PROMPTS[0], GREEDY))
    assert (deltas[-1].finish_reason, deltas[-1].error) == ("error", "the step failed: ValueError: broken")
    assert sum(len(delta.token_ids) for delta in deltas) == 2
    assert_idle_and_clean(llm)


def test_a_full_queue_refuses_a_stream_and_keeps_nothing_of_it(path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=64, max_running_requests=1, max_queued_requests=1)
    running, waiting = llm.stream([1, 2], GREEDY), llm.stream([1, 3], GREEDY)
    next(running)
    prepared = llm.prepare([1, 3], GREEDY)[0]
    llm.submit(prepared)
    with pytest.raises(QueueFull):
        next(waiting)
    with pytest.raises(QueueFull):
        next(llm.stream([1, 3], SamplingParams(n=3)))
    assert len(llm.scheduler.requests) == 2
    assert len(list(running)) >= 7
    llm.abort(prepared)
    assert_idle_and_clean(llm)


def test_the_time_limit_ends_a_request_with_an_error(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(0.0, 1e-6)
    skipped = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock) + skipped)
    llm = LLM(path, page_size=4, num_pages=64, request_timeout=30.0)
    stream = llm.stream([1, 2], GREEDY)
    next(stream)
    skipped += 29.9
    next(stream)
    skipped += 0.2
    last = list(stream)[-1]
    assert last.finish_reason == "error"
    assert "time limit" in (last.error or "")
    assert_idle_and_clean(llm)
    assert llm.generate([1, 2], GREEDY)[0].finish_reason == "length"


def test_prompts_beyond_the_pool_end_with_an_error_and_the_others_complete(path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=6, dtype="float64")
    outputs = llm.generate([[1] * 5, [2] * 25, [3] * 20, [4] * 6], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "error", "length"]
    assert "25 tokens" in (outputs[1].error or "")
    assert "outgrew the KV cache" in (outputs[2].error or "")
    assert len(outputs[2].token_ids) == 5
    assert_idle_and_clean(llm)
    ample = LLM(path, page_size=4, num_pages=64, dtype="float64").generate([[1] * 5, [4] * 6], GREEDY)
    assert [output.token_ids for output in ample] == [outputs[0].token_ids, outputs[3].token_ids]
