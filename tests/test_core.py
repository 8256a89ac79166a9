"""The engine without text: requests in, step outputs out, and observers that follow the steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from minisgl.batch import Batch, StepPhase
from minisgl.config import EngineConfig
from minisgl.core import EngineCore
from minisgl.errors import ConfigError, ContextExceeded, EngineDead
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import DirectedExecutor, Failing, assert_idle_and_clean, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def core(tmp_path: Path, request: pytest.FixtureRequest) -> EngineCore:
    path = str(text_checkpoint(tmp_path))
    config = EngineConfig(model=path, page_size=4, num_pages=8, device="cpu", overlap=request.param)
    return EngineCore(config, DirectedExecutor(config))


def added(core: EngineCore, *prompts: list[int], streaming: bool = False) -> list[Request]:
    requests = [request for prompt in prompts for request in core.input_processor.process(prompt, GREEDY, streaming)]
    for request in requests:
        core.add(request)
    return requests


class Diary:
    def __init__(self) -> None:
        self.phases: list[str] = []
        self.steps: dict[StepPhase, list[Batch | None]] = {}
        self.finished: list[int] = []

    def begin(self, phase: StepPhase, batch: Batch | None) -> None:
        self.phases.append(phase)

    def end(self, phase: StepPhase, batch: Batch | None) -> None:
        self.phases.append(f"/{phase}")
        self.steps.setdefault(phase, []).append(batch)

    def finish(self, requests: Sequence[Request]) -> None:
        self.finished += [request.uid for request in requests]


def test_tokens_and_ends_come_out_of_steps(core: EngineCore) -> None:
    first, second = added(core, [1, 2, 3], [4, 5], streaming=True)
    tokens: dict[int, list[int]] = {first.uid: [], second.uid: []}
    finished = []
    while core.has_work:
        output = core.step()
        for event in output.events:
            tokens[event.request.uid].append(event.token_id)
        finished += output.finished
    assert sorted(request.uid for request in finished) == [first.uid, second.uid]
    assert tokens == {first.uid: first.output, second.uid: second.output}
    assert len(first.output) == 4
    assert_idle_and_clean(core)


def test_an_observer_follows_every_step_until_it_is_taken_away(core: EngineCore) -> None:
    diary = Diary()
    with core.observe(diary):
        one, two = added(core, [1, 2, 3], [4, 5])
        core.step()
        core.finish(two.uid)
        core.take_output()
        while core.has_work:
            core.step()
    batches = diary.steps["launch"]
    for phase in ("compute", "wait", "process"):
        assert [id(batch) for batch in diary.steps[phase]] == [id(batch) for batch in batches]
    assert [id(batch) for batch in diary.steps["schedule"] if batch is not None] == [id(batch) for batch in batches]
    launch = diary.phases.index("launch")
    assert diary.phases[launch : launch + 4] == ["launch", "compute", "/compute", "/launch"]
    assert diary.finished == [two.uid, one.uid]
    before = len(diary.phases)
    added(core, [6])
    core.step()
    assert len(diary.phases) == before
    assert core.loop.observers == core.executor.observers == []


def test_a_failed_step_has_no_process(core: EngineCore) -> None:
    core.executor.launcher = Failing(core.engine, 1, RuntimeError("broken"), late=True)
    diary = Diary()
    with core.observe(diary):
        added(core, [1, 2, 3])
        while core.has_work:
            core.step()
    failed = 1 + core.loop.depth
    assert len(diary.steps["fail"]) == failed
    assert len(diary.steps["process"]) == len(diary.steps["launch"]) - failed == 1


def test_a_dead_executor_ends_all_requests_at_once(core: EngineCore) -> None:
    requests = added(core, [1, 2, 3], [4, 5])
    core.step()
    waiting = added(core, [6, 7])
    core.executor.launcher = Failing(core.engine, 0, EngineDead("a rank has ended"))
    with pytest.raises(EngineDead, match="a rank has ended"):
        core.step()
    finished = core.take_output().finished
    assert {request.uid for request in finished} == {request.uid for request in [*requests, *waiting]}
    assert all(request.finish_reason is FinishReason.ERROR for request in finished)
    assert all("a rank has ended" in (request.error or "") for request in finished)
    assert_idle_and_clean(core)


def test_what_can_never_fit_is_refused_where_that_is_asked(core: EngineCore) -> None:
    processor = core.input_processor
    (fits,) = processor.process([1] * 30, SamplingParams(max_tokens=3))
    processor.check_fits(fits)
    (too_long,) = processor.process([1] * 33, SamplingParams(max_tokens=3))
    with pytest.raises(ContextExceeded, match="prompt: 33 tokens do not fit the KV cache of 32 tokens"):
        processor.check_fits(too_long)
    (too_many,) = processor.process([1] * 30, SamplingParams(max_tokens=4))
    with pytest.raises(ContextExceeded, match=r"max_tokens: 4 .* at most 3 fit"):
        processor.check_fits(too_many)
    core.add(too_long)
    assert core.step().finished == [too_long]
    assert too_long.finish_reason is FinishReason.ERROR


def test_an_engine_in_other_processes_cannot_be_looked_into(core: EngineCore) -> None:
    assert core.engine is core.executor.engine
    core.executor.local_engine = None
    with pytest.raises(ConfigError, match=r"tensor_parallel_size: .* in processes of their own"):
        _ = core.engine
