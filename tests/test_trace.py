"""The recorder: what it notes of an engine's steps, what it exports, and how it reads a GPU's clock."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.trace import DEVICE, HOST, REQUESTS, TRACKS, Event, Trace
from tests.drafting import KnowsTheAnswers, draft_always
from tests.tiny_text_model import Failing, assert_idle_and_clean, directed_llm, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("trace"))


@pytest.fixture(params=[False, True], ids=["plain", "overlap"])
def llm(path: Path, request: pytest.FixtureRequest) -> LLM:
    return directed_llm(path, page_size=4, num_pages=64, device="cpu", overlap=request.param)


def named(trace: Trace, name: str) -> list[Event]:
    return [event for event in trace.events if event.name == name]


def numbers(events: list[Event]) -> list[int]:
    return [event.args["step"] for event in events]


# -- what is recorded ----------------------------------------------------------------------------------------------


def test_every_step_is_scheduled_launched_computed_waited_for_and_processed(llm: LLM) -> None:
    with llm.trace() as trace:
        outputs = llm.generate(PROMPTS, GREEDY)
    every = list(range(6))
    for name in ("launch", "wait", "process"):
        assert numbers(named(trace, name)) == every
    assert [event.args["step"] for event in named(trace, "schedule") if event.args] == every
    on_device = [event for event in trace.events if event.track == DEVICE]
    assert numbers(on_device) == every
    assert [event.name for event in on_device] == ["prefill"] + ["decode"] * 5
    assert all(
        event.track == HOST for name in ("schedule", "launch", "wait", "process") for event in named(trace, name)
    )
    assert [output.token_ids for output in outputs] == [output.token_ids for output in llm.generate(PROMPTS, GREEDY)]


def test_a_launch_tells_the_rows_for_a_token_chart(llm: LLM) -> None:
    with llm.trace() as trace:
        llm.generate([PROMPTS[0]], GREEDY)
        llm.generate([PROMPTS[0] * 2], GREEDY)
    prefill, decode, *_ = named(trace, "launch")
    common = {"rows": 1, "uids": [0], "constrained": 0}
    assert prefill.args == {**common, "step": 0, "tokens": 5, "decode": 0, "fed": [5], "cached": [0]}
    assert decode.args == {**common, "step": 1, "tokens": 1, "decode": 1, "fed": [1], "cached": [5]}
    second = next(event for event in named(trace, "launch") if event.args["uids"] == [1])
    assert (second.args["fed"], second.args["cached"]) == ([6], [4])


def test_a_launch_tells_how_many_masks_it_has(llm: LLM) -> None:
    with llm.trace() as trace:
        llm.generate([PROMPTS[0]] * 2, [GREEDY, SamplingParams(regex="x{2}")])
    assert sum(event.args["constrained"] for event in named(trace, "launch")) == 2


def test_a_step_that_verifies_drafts_decodes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [[*prompt, *directed_llm(path).generate(prompt, GREEDY)[0].token_ids] for prompt in PROMPTS]
    monkeypatch.setattr(KnowsTheAnswers, "answers", answers)
    llm = draft_always(directed_llm(path, page_size=4, device="cpu", drafter="tests.drafting:KnowsTheAnswers"))
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    rows = [event.args for event in named(trace, "launch")]
    assert any(max(each["fed"]) > 1 for each in rows[1:])
    assert [each["decode"] for each in rows] == [0] + [each["rows"] for each in rows[1:]]
    assert {event.name for event in trace.events if event.track == DEVICE} == {"prefill", "decode"}


def test_with_overlap_a_step_is_launched_before_the_one_before_it_is_waited_for(path: Path) -> None:
    order = {}
    for overlap in (False, True):
        llm = LLM(path, page_size=4, num_pages=64, device="cpu", overlap=overlap)
        with llm.trace() as trace:
            llm.generate(PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True))
        host = [event for event in trace.events if event.track == HOST and "step" in event.args]
        order[overlap] = " ".join(f"{event.name[0]}{event.args['step']}" for event in host)
    assert order[False] == "s0 l0 w0 p0 s1 l1 w1 p1 s2 l2 w2 p2"
    assert order[True] == "s0 l0 s1 l1 w0 p0 s2 l2 w1 p1 w2 p2"


def test_what_becomes_of_requests(path: Path, llm: LLM) -> None:
    llm = LLM(path, page_size=4, num_pages=8, device="cpu", overlap=llm.config.overlap)
    with llm.trace() as trace:
        outputs = llm.generate([[1] * 5, [2] * 5, [3] * 5], SamplingParams(max_tokens=14, ignore_eos=True, seed=1))
    requests = [event for event in trace.events if event.track == REQUESTS]
    assert all(event.duration is None for event in requests)
    preemptions = [output.metrics.preemptions for output in outputs]
    assert sum(preemptions) > 0
    for uid, times in enumerate(preemptions):
        mine = [event for event in requests if event.args["uid"] == uid]
        assert [event.name for event in mine] == ["admit"] + ["preempt", "admit"] * times + ["finish"]
        assert mine[-1].args["reason"] == "length"


def test_a_failed_step_and_the_end_of_the_trace(llm: LLM) -> None:
    llm.executor.launcher = Failing(llm.engine, 2, RuntimeError("broken"))
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    assert numbers(named(trace, "fail")) == [2]
    assert [event.args["reason"] for event in named(trace, "finish")] == ["error"] * 3
    before = len(trace.events)
    llm.generate(PROMPTS, GREEDY)
    assert len(trace.events) == before
    assert_idle_and_clean(llm)


def test_a_trace_may_begin_and_end_with_a_step_in_flight(path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=64, device="cpu", overlap=True)
    stream = llm.stream(PROMPTS[0], GREEDY)
    first = [next(stream), next(stream)]
    with llm.trace() as trace:
        first.append(next(stream))
    tokens = [token for delta in [*first, *stream] for token in delta.token_ids]
    assert tokens == llm.generate(PROMPTS[0], GREEDY)[0].token_ids
    assert numbers(named(trace, "launch")) == [0]
    assert [event.args for event in named(trace, "process")] == [{}]
    assert_idle_and_clean(llm)


# -- the recorder --------------------------------------------------------------------------------------------------


def test_events_are_in_the_order_of_their_start() -> None:
    trace = Trace()
    late = Event("late", DEVICE, trace.start + 60.0, 0.5)
    trace.add(late)
    trace.instant("now", answer=1)
    trace.instant("early", at=trace.start - 1.0)
    early, now, last = trace.events
    assert last is late
    assert (early.name, early.start, early.duration) == ("early", trace.start - 1.0, None)
    assert (now.name, now.track, now.args) == ("now", REQUESTS, {"answer": 1})
    assert trace.start <= now.start == now.end


def test_a_launch_that_fails_is_recorded_without_a_span_of_the_device(llm: LLM) -> None:
    def broken(*step: object) -> None:
        raise RuntimeError("broken")

    with llm.trace() as trace, pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner, "run", broken)
        llm.generate([PROMPTS[0]], GREEDY)
    assert [event.name for event in trace.events if event.track != REQUESTS] == ["schedule", "launch", "fail"] + [
        "schedule"
    ] * (len(named(trace, "schedule")) - 1)


def test_the_export_is_what_perfetto_reads(llm: LLM, tmp_path: Path) -> None:
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    file = tmp_path / "x.json"
    trace.export(file)
    written = json.loads(file.read_text())["traceEvents"]
    assert [(e["tid"], e["args"]["name"]) for e in written if e["ph"] == "M"] == list(enumerate(TRACKS))
    events = [e for e in written if e["ph"] != "M"]
    assert len(events) == len(trace.events)
    for got, event in zip(events, trace.events, strict=True):
        assert (got["name"], TRACKS[got["tid"]], got["args"]) == (event.name, event.track, event.args)
        assert got["ph"] == ("i" if event.duration is None else "X")
        assert (got["pid"], got.get("s")) == (0, "t" if event.duration is None else None)
        assert got["ts"] == pytest.approx((event.start - trace.start) * 1e6)
        assert got["ts"] >= 0
        assert got.get("dur") == (None if event.duration is None else pytest.approx(event.duration * 1e6))


def test_a_summary_on_the_cpu() -> None:
    """The host's time is schedule, launch and process, less what the CPU computed; waiting does not count."""
    trace = Trace(torch.device("cpu"))
    for step in range(2):
        for name in ("schedule", "wait", "process"):
            trace.add(Event(name, HOST, 0.0, 1.0, {"step": step}))
        trace.add(Event("launch", HOST, 0.0, 3.0, {"step": step}))
        trace.add(Event("decode", DEVICE, 1.0, 1.0, {"step": step}))
    trace.add(Event("schedule", HOST, 0.0, 1.0))  # found nothing to do
    summary = trace.summary()
    assert (summary.steps, summary.host_median, summary.host_p95) == (2, 1 + 1 + (3 - 1), 4.0)
    assert summary.gpu_idle is None
    assert Trace().summary().steps == 0


def test_what_was_exported_can_be_loaded(llm: LLM, tmp_path: Path) -> None:
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    trace.export(tmp_path / "all.json")
    loaded = Trace.load(tmp_path / "all.json")
    assert [(e.name, e.track, e.args) for e in loaded.events] == [(e.name, e.track, e.args) for e in trace.events]
    for read, event in zip(loaded.events, trace.events, strict=True):
        assert (read.duration is None) == (event.duration is None)
        assert read.start == pytest.approx(event.start - trace.start, abs=1e-9)
        assert read.end - read.start == pytest.approx(event.end - event.start, abs=1e-9)
    assert loaded.summary().steps == trace.summary().steps
    assert loaded.summary().host_median == pytest.approx(trace.summary().host_median)
    loaded.export(tmp_path / "again.json")
    assert len(Trace.load(tmp_path / "again.json").events) == len(trace.events)


def test_an_excerpt_begins_with_its_first_step(llm: LLM, tmp_path: Path) -> None:
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    excerpt = trace.excerpt(2, 3)
    assert {event.args["step"] for event in excerpt.events} == {2, 3, 4}
    assert numbers(named(excerpt, "launch")) == [2, 3, 4]
    assert excerpt.start == named(trace, "schedule")[2].start == excerpt.events[0].start
    excerpt.export(tmp_path / "x.json")
    assert Trace.load(tmp_path / "x.json").events[0].start == 0.0
    assert trace.excerpt(100, 2).events == []


# -- the GPU's clock -----------------------------------------------------------------------------------------------


class FakeEvent:
    """A CUDA event on a device whose clock shows the next of some given milliseconds at each `record`."""

    clock: Iterator[float]

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = next(self.clock)

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_device_spans_are_measured_by_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeEvent.clock = iter([500.0, 510.0, 530.0, 532.0, 550.0, 560.0, 570.0, 575.0, 595.0])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr("time.perf_counter", lambda: 100.0)
    trace = Trace(torch.device("cuda"))
    for step, name in enumerate(["decode", "decode", "prefill", "decode"]):
        trace.add(Event("launch", HOST, 100.0, 0.0, {"step": step}))
        mark = trace.device_mark()
        if step != 3:  # the last one was launched in vain
            trace.add_device_span(name, mark, {"step": step})
    spans = [event for event in trace.events if event.track == DEVICE]
    assert [event.start for event in spans] == pytest.approx([100.010, 100.032, 100.060])
    assert [event.duration for event in spans] == pytest.approx([0.020, 0.018, 0.010])
    assert trace.summary().gpu_idle == trace.excerpt(0, 9).summary().gpu_idle == pytest.approx(2 / 20)
    assert len(trace.events) == 4 + 3, "resolved once"


@pytest.mark.gpu
@pytest.mark.parametrize("overlap", [False, True])
def test_a_trace_of_a_gpu(path: Path, overlap: bool, tmp_path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=64, device="cuda", overlap=overlap)
    llm.generate(PROMPTS, GREEDY)
    with llm.trace() as trace:
        llm.generate(PROMPTS, GREEDY)
    launches, waits = named(trace, "launch"), named(trace, "wait")
    spans: list[Any] = [event for event in trace.events if event.track == DEVICE]
    assert numbers(spans) == numbers(launches) == numbers(waits)
    for launch, span, wait in zip(launches, spans, waits, strict=True):
        assert launch.start - 1e-4 < span.start < span.end < wait.end + 1e-4
    for before, after in itertools.pairwise(spans):
        assert before.end <= after.start + 1e-5
    summary = trace.summary()
    assert 0.0 <= (summary.gpu_idle or 0.0) < 1.0
    trace.export(tmp_path / "x.json")
