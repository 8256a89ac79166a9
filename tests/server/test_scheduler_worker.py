"""The engine's station alone: tokens in, tokens out, and nothing kept."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.server import scheduler_worker
from minisgl.server.messages import (
    Abort,
    Finished,
    Progress,
    RequestAccepted,
    StatsRequest,
    Stop,
    Token,
    Tokenized,
    pack,
)
from minisgl.server.scheduler_worker import EngineStage
from minisgl.trace import Trace
from tests.tiny_text_model import Scripted, assert_idle_and_clean, directed_llm, text_checkpoint

LOOPS = [False, True]


@pytest.fixture(params=LOOPS, ids=["step-by-step", "overlap"])
def llm(request: pytest.FixtureRequest, tmp_path: Path) -> LLM:
    return directed_llm(
        text_checkpoint(tmp_path), page_size=4, num_pages=32, overlap=request.param, max_queued_requests=8
    )


def tokenized(job: int, *prompts: list[int], streaming: bool = False, **params: Any) -> Tokenized:
    fields = {"temperature": 0, "ignore_eos": True, "max_tokens": 6, **params}
    return Tokenized(job, [pack(prompt) for prompt in prompts], fields, streaming)


def run(stage: EngineStage, until: Callable[[Progress], bool] = lambda progress: False) -> Progress:
    """Step until there is no work, or ``until`` holds of all that was told so far."""
    total = Progress()
    while stage.has_work and not until(total):
        progress = stage.step()
        for name in Progress.__struct_fields__:
            getattr(total, name).extend(getattr(progress, name))
    return total


def test_who_streams_gets_tokens_and_the_others_all_at_the_end(llm: LLM) -> None:
    expected = [
        output.token_ids
        for output in llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=6, temperature=0, ignore_eos=True))
    ]
    stage = EngineStage(llm.core)
    stage.take(tokenized(1, [5, 6, 7], streaming=True))
    stage.take(tokenized(2, [8, 9], stop=["never to be seen"], min_tokens=2))
    stage.take(tokenized(3, [8, 9]))
    told = run(stage)
    streamed, watched, whole = (begun.uids[0] for begun in told.accepted)
    assert [begun.job for begun in told.accepted] == [1, 2, 3]
    assert [begun.prompt_lens for begun in told.accepted] == [[3], [2], [2]]
    assert told.accepted[1] == RequestAccepted(2, [watched], [2], False, ["never to be seen"], 2)
    tokens = {uid: [token.token_id for token in told.tokens if token.uid == uid] for uid in (streamed, watched, whole)}
    assert tokens == {streamed: expected[0], watched: expected[1], whole: []}
    ends = {end.uid: end for end in told.finished}
    assert {end.reason for end in ends.values()} == {"length"}
    assert (ends[streamed].token_ids, ends[whole].token_ids) == ([], expected[1])
    assert_idle_and_clean(llm)


def test_choices_are_in_the_order_of_the_prompts(llm: LLM) -> None:
    stage = EngineStage(llm.core)
    stage.take(tokenized(1, [5, 6], [7, 8, 9], n=2, logprobs=1))
    told = run(stage)
    assert (len(told.accepted[0].uids), told.accepted[0].prompt_lens) == (4, [2, 3])
    assert sorted(end.uid for end in told.finished) == told.accepted[0].uids
    assert all(len(end.logprobs) == len(end.token_ids) == 6 for end in told.finished)


@pytest.mark.parametrize("streaming", [False, True])
def test_what_is_known_when_a_request_leaves_the_queue_is_told_once(llm: LLM, streaming: bool) -> None:
    stage = EngineStage(llm.core)
    for job in range(2):
        stage.take(tokenized(job, list(range(5, 18)), streaming=streaming))
        told = run(stage)
        ((uid, cached_tokens, queue_time),) = [(each.uid, each.cached_tokens, each.queue_time) for each in told.started]
        assert (uid, cached_tokens) == (told.accepted[0].uids[0], 12 * job)
        assert queue_time > 0
    assert not stage._unstarted


def test_an_abort_ends_a_job_wherever_it_is(llm: LLM) -> None:
    stage = EngineStage(llm.core)
    for job in (1, 2):
        stage.take(tokenized(job, [5, 6], [7, 8], max_tokens=40, streaming=True))
    stage.take(Abort(2))  # before its first step
    begun = run(stage, until=lambda told: len(told.tokens) >= 6)
    stage.take(Abort(1))
    stage.take(Abort(1))
    stage.take(Abort(99))
    told = run(stage)
    ends = [*begun.finished, *told.finished]
    assert sorted(end.uid for end in ends) == sorted(uid for each in begun.accepted for uid in each.uids)
    assert {end.reason for end in ends} == {"abort"}
    assert_idle_and_clean(llm)


def test_a_stop_ends_requests_and_may_come_too_late(llm: LLM) -> None:
    stage = EngineStage(llm.core)
    stage.take(tokenized(1, [5, 6], [7, 8], max_tokens=40, streaming=True))
    first, second = run(stage, until=lambda told: bool(told.tokens)).accepted[0].uids
    stage.take(Stop([first]))
    told = run(stage)
    assert [(end.uid, end.reason) for end in told.finished] == [(first, "stop"), (second, "length")]
    stage.take(Stop([first, second, 99]))
    assert run(stage) == Progress()
    assert_idle_and_clean(llm)


@pytest.mark.parametrize(
    ("bad", "field"),
    [
        ([tokenized(1, [])], "prompt"),
        ([tokenized(1, [5], [300])], "prompt"),
        ([tokenized(1, [5] * 129)], "prompt"),
        ([tokenized(1, [5], max_tokens=-5)], "max_tokens"),
        ([tokenized(1, [5], max_tokens=200)], "max_tokens"),
        ([tokenized(1, [5], no_such_thing=1)], "no_such_thing"),
        ([tokenized(1, *[[5]] * 9)], ""),
    ],
)
def test_a_bad_job_is_rejected_as_a_whole(llm: LLM, bad: list[Tokenized], field: str) -> None:
    stage = EngineStage(llm.core)
    stage.take(tokenized(0, [5, 6]))
    stage.take(bad[0])
    assert len(llm.scheduler.requests) == 1
    told = run(stage)
    ((job, failure),) = [(rejected.job, rejected.failure) for rejected in told.rejected]
    assert (job, failure.field) == (1, field)
    assert failure.kind in (("InvalidRequest", "ContextExceeded") if field else ("QueueFull",))
    assert [end.reason for end in told.finished] == ["length"], "the others go on"
    assert_idle_and_clean(llm)


def test_a_question_is_answered_between_two_steps(llm: LLM) -> None:
    stage = EngineStage(llm.core, {"pages": lambda: str(llm.scheduler.memory.num_pages).encode()})
    stage.take(tokenized(1, [5, 6], [7, 8], max_tokens=40))
    stage.step()
    stage.take(StatsRequest(4, "pages"))
    stage.take(StatsRequest(5))
    told = stage.step().stats
    assert [(each.number, each.content, each.states) for each in told] == [
        (4, b"32", {"scheduler": 3}),
        (5, b"", {"scheduler": 3}),
    ]
    run(stage)
    stage.take(StatsRequest(6))
    assert stage.step().stats[0].states == {"scheduler": 0}


def test_one_token_too_many_is_never_sent(llm: LLM) -> None:
    llm.executor.launcher = Scripted([7, 1, 8, 8])  # the second is the end of the sequence
    stage = EngineStage(llm.core)
    stage.take(tokenized(1, [5, 6], streaming=True, ignore_eos=False))
    told = run(stage)
    uid = told.accepted[0].uids[0]
    assert told.tokens == [Token(uid, 7), Token(uid, 1)]
    assert told.finished == [Finished(uid, "stop")]


def test_the_last_steps_are_written_when_it_is_over(
    reference: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_worker, "MAX_EVENTS", 40)
    file = tmp_path / "trace.json"

    def serve() -> None:
        with scheduler_worker.record_trace(reference.core, str(file)):
            reference.generate([5, 6, 7], SamplingParams(max_tokens=60, ignore_eos=True))
            raise SystemExit(0)  # the way in which signals end a server

    with pytest.raises(SystemExit):
        serve()
    events = json.loads(file.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] != "M"]) == 40
    steps = [event.args["step"] for event in Trace.load(file).events if "step" in event.args]
    assert (min(steps) > 30, max(steps)) == (True, 59)


def test_a_file_that_cannot_be_written_is_found_out_at_once(reference: LLM, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match=r"^trace: cannot write"),
        scheduler_worker.record_trace(reference.core, str(tmp_path / "nowhere" / "trace.json")),
    ):
        pass
