from __future__ import annotations

from pathlib import Path

import pytest

from minisgl import LLM, SamplingParams
from minisgl.server.live import steps
from minisgl.server.live.state import MOST_FINISHED, MOST_SLICES
from minisgl.server.live.steps import StepWatch
from tests.tiny_text_model import Failing, Scripted

PARAMS = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)


@pytest.fixture(params=[False, True], ids=["in turn", "overlap"])
def llm(checkpoint: Path, request: pytest.FixtureRequest) -> LLM:
    return LLM(str(checkpoint), page_size=4, num_pages=32, device="cpu", overlap=request.param)


def watch(llm: LLM) -> StepWatch:
    watching = StepWatch(llm.scheduler.table)
    llm.loop.observers.append(watching)
    return watching


def test_nothing_is_recorded_while_nobody_watches(llm: LLM) -> None:
    llm.loop.executor = Scripted([5])
    watching = watch(llm)
    for prompt in ([1, 2], [3, 4]):
        llm.submit(llm.prepare(prompt, PARAMS)[0])
    for _ in range(3):
        llm.step()
    assert not watching.slices
    assert not watching._launched
    assert not watching.finished()


def test_slices_hold_every_token_of_every_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SHORTEST_SLICE", 0.0)
    watching = watch(llm)
    watching.look()
    outputs = llm.generate([[1, 2, 3, 4, 5], [1, 2, 3, 4, 6], [9] * 11], PARAMS)
    slices = watching.slices
    assert [each.number for each in slices] == list(range(1, len(slices) + 1))
    assert all(a.end <= b.start <= b.end for a, b in zip(slices, list(slices)[1:], strict=False))
    fed = {uid: (0, 0) for uid in range(3)}
    for each in slices:
        assert each.prefill == sum(prefill for _, prefill, _ in each.rows)
        assert each.decode == sum(decode for _, _, decode in each.rows)
        for uid, prefill, decode in each.rows:
            fed[uid] = (fed[uid][0] + prefill, fed[uid][1] + decode)
    for uid, output in enumerate(outputs):
        assert fed[uid] == (len(output.prompt_token_ids) - output.cached_tokens, 11)  # the last token is not fed


def test_short_steps_are_put_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SHORTEST_SLICE", 1000.0)
    watching = watch(llm)
    watching.look()
    llm.generate([[1, 2, 3], [4, 5, 6]], PARAMS)
    (slice_,) = watching.slices
    assert (slice_.number, slice_.prefill, slice_.decode) == (1, 6, 22)
    assert sorted(slice_.rows) == [(0, 3, 11), (1, 3, 11)]
    assert slice_.steps == 12


def test_a_preemption_is_noted_with_the_step_that_it_made_room_for(checkpoint: Path) -> None:
    llm = LLM(str(checkpoint), page_size=4, num_pages=8, device="cpu", admission_policy="optimistic", overlap=False)
    watching = watch(llm)
    watching.look()
    params = SamplingParams(max_tokens=18, temperature=0, ignore_eos=True)
    generations = [llm.prepare([prompt] * 9, params)[0] for prompt in (1, 2)]
    for generation in generations:
        llm.submit(generation)
    noted: dict[int, list[int]] = {}
    while llm.scheduler.has_work:
        llm.step()
        noted.update((each.number, each.preempted) for each in watching.slices)
    uids = [uid for preempted in noted.values() for uid in preempted]
    assert uids == [1] * generations[1].request.preemptions != []


def test_a_failed_step_is_a_step(llm: LLM) -> None:
    llm.loop.executor = Failing(llm.engine, 1, RuntimeError("broken"), late=True)
    watching = watch(llm)
    watching.look()
    (output,) = llm.generate([[1, 2, 3]], PARAMS)
    assert output.finish_reason == "error"
    assert sum(each.steps for each in watching.slices) == 2
    (request,) = watching.finished()
    assert request.error is not None


def test_what_is_kept_is_bounded(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "SHORTEST_SLICE", 0.0)
    llm.loop.executor = Scripted([5])
    watching = watch(llm)
    watching.look()
    llm.generate([[uid + 1] for uid in range(3 * MOST_FINISHED)], PARAMS)
    assert [request.uid for request in watching.finished()] == list(range(2 * MOST_FINISHED, 3 * MOST_FINISHED))
    assert len(watching._seen) == MOST_FINISHED
    assert len(watching.slices) == MOST_SLICES
