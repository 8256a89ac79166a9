"""One step in flight: what is launched when, and whom a failure takes with it. Random lives are in `test_fuzz`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from minisgl.batch import Batch
from minisgl.errors import EngineDead
from minisgl.request import FinishReason
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.scheduler import StepOutput
from tests.fake_executor import Fault
from tests.scheduler.harness import Harness

CACHES = ["radix", "block-hash"]
BROKEN = RuntimeError("broken")


def test_one_step_stays_in_flight_until_nothing_can_be_scheduled() -> None:
    harness = Harness(delay=1)
    request = harness.add([1, 2, 3], max_tokens=3, watched=True)
    seen = []
    for _ in range(4):
        harness.step()
        seen.append((len(harness.batches), len(harness.seen[request.uid])))
    assert seen == [(1, 0), (2, 1), (3, 2), (3, 3)], "steps launched and tokens known after each call of `step`"
    assert not harness.scheduler.has_work
    harness.assert_output(request)


def test_a_request_that_has_ended_holds_its_slot_until_the_step_in_flight_is_over() -> None:
    harness = Harness(delay=1, vocab=2)
    request = harness.add([1, 0, 1], max_tokens=50, stop_ids=(0, 1))
    harness.step()
    harness.step()
    assert request.finish_reason is FinishReason.STOP
    assert not harness.scheduler.requests
    assert harness.memory.available == harness.memory.num_pages
    assert len(harness.table) == 1
    assert harness.scheduler.has_work, "a loop that steps while there is work drains the step in flight"
    harness.step()
    assert not harness.scheduler.has_work
    harness.assert_idle_and_clean()
    harness.assert_output(request)


@pytest.mark.parametrize("cache", CACHES)
def test_a_failure_takes_the_step_after_it_along(cache: str) -> None:
    """The second request reads pages that the first one's step cached and never wrote; the third is in neither."""
    harness = Harness(prefix_cache=cache, delay=1, max_prefill_tokens=64, batch_policy="prefill-first")
    bystander = harness.add([2, 1, 2], max_tokens=9)
    harness.step()
    harness.step()
    first = harness.add([1] * 20, max_tokens=9)
    harness.faulty.fault = Fault(at_launch=False, error=BROKEN)
    harness.step()
    second = harness.add([1] * 24, max_tokens=9)
    harness.step()
    assert second.cached_tokens > 0
    for request in (first, second):
        assert request.error == "the step failed: RuntimeError: broken"
        assert request.output == []
    assert bystander.finish_reason is None
    third = harness.add([1] * 24, max_tokens=9)
    harness.run()
    assert third.cached_tokens == 0
    for request in (bystander, third):
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)
    harness.assert_idle_and_clean()


def test_a_launch_that_fails_leaves_the_step_before_it_alone() -> None:
    harness = Harness(delay=1, max_prefill_tokens=64)
    decoding = harness.add([2, 1, 2], max_tokens=9)
    harness.step()
    prefilling = harness.add([1] * 20, max_tokens=9)
    harness.faulty.fault = Fault(at_launch=True, error=BROKEN)
    harness.step()
    assert prefilling.finish_reason is FinishReason.ERROR
    harness.run()
    assert decoding.finish_reason is FinishReason.LENGTH
    harness.assert_output(decoding)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", CACHES)
def test_a_preempted_request_whose_step_fails_is_not_resumed(cache: str) -> None:
    """It lost its pages to the cache while a step still wrote them. That step fails, so nobody may find them there."""
    harness = Harness(prefix_cache=cache, num_pages=6, page_size=2, max_prefill_tokens=8, delay=1)
    first, last = harness.add([1, 2, 0, 1], max_tokens=8), harness.add([0, 1, 2, 2], max_tokens=8)
    harness.step()
    harness.step()
    harness.faulty.fault = Fault(at_launch=False, error=BROKEN)
    harness.step()
    assert last.preemptions == 0
    harness.step()
    assert last.preemptions == 1
    for request in (first, last):
        assert request.finish_reason is FinishReason.ERROR
        assert len(request.output) == 2
        harness.assert_output(request)
    assert not harness.scheduler.has_work
    assert harness.memory.cache.num_pages == 0
    again = harness.add([0, 1, 2, 2], max_tokens=8)
    harness.run()
    assert again.finish_reason is FinishReason.LENGTH
    harness.assert_output(again)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("at_launch", [True, False])
def test_an_interrupt_ends_the_requests_of_its_step_and_leaves_the_others(at_launch: bool) -> None:
    harness = Harness(delay=1, max_prefill_tokens=64, batch_policy="prefill-first")
    bystander = harness.add([2, 1, 2], max_tokens=9)
    harness.step()
    harness.step()
    interrupted = harness.add([1] * 20, max_tokens=9)
    harness.faulty.fault = Fault(at_launch=at_launch, error=KeyboardInterrupt())
    harness.step()
    if not at_launch:
        assert interrupted.error is None, "its step is still in flight"
        waiting = harness.add([0] * 20, max_tokens=9)
        harness.step()
        assert waiting.error == "interrupted", "its step was launched after the interrupted one"
    assert interrupted.error == "interrupted"
    assert bystander.finish_reason is None, "it is in no step that failed"
    harness.run()
    harness.assert_output(bystander)
    harness.assert_idle_and_clean()


# -- what a loop does, call by call


class FailsWithoutRaising(EngineLoop):
    """A loop whose `_fail` is the simplest: tests of its callers need no other."""

    def _fail(self, batches: Sequence[Batch], error: BaseException) -> None:
        for batch in batches:
            self.scheduler.fail(batch, type(error).__name__)


class Rehearsal:
    """The scheduler, the executor and an observer of a loop, all in one. Its steps are numbers, and one may fail.

    ``calls`` is what the loop has called, in order.
    """

    def __init__(self, kind: type[EngineLoop], steps: int = 2, broken: str = "", error: BaseException = BROKEN) -> None:
        self.loop = kind(cast(Any, self), cast(Any, self), depth=1)
        self.calls: list[str] = []
        self.messages: list[str] = []
        self._left = list(range(steps))
        self._broken, self._error = broken, error

    def run(self, calls: int) -> list[str]:
        """Call the loop's `step` so many times, note the broken step's error if it is raised, and return all notes."""
        for _ in range(calls):
            try:
                self.loop.step()
            except BaseException as error:
                if error is not self._error:
                    raise
                self.calls.append(f"raise {type(error).__name__}")
        return self.calls

    def schedule(self) -> int | None:
        return self._left.pop(0) if self._left else None

    def launch(self, step: int) -> SimpleNamespace:
        self._note("launch", step)
        return SimpleNamespace(wait=partial(self._note, "wait", step))

    def process(self, step: int, result: str) -> None:
        assert result == f"wait {step}", "a step is processed with its own result"
        self._note("process", step)

    def fail(self, step: int, message: str) -> None:
        self._note("fail", step)
        self.messages.append(message)

    def take_output(self) -> StepOutput:
        return StepOutput()

    def begin(self, phase: str, step: int | None) -> None:
        if phase != "schedule":
            self.calls.append(f"begin {phase} {step}")

    def end(self, phase: str, step: int | None) -> None:
        if phase != "schedule":
            self.calls.append(f"end {phase} {step}")

    def _note(self, call: str, step: int) -> str:
        note = f"{call} {step}"
        self.calls.append(note)
        if note == self._broken:
            raise self._error
        return note


def observed(*calls: str) -> list[str]:
    """Each call between the beginning and the end of its phase."""
    return [each for call in calls for each in (f"begin {call}", call, f"end {call}")]


INTERRUPT, DEAD = KeyboardInterrupt(), EngineDead("gone")


def test_the_next_step_is_launched_before_the_oldest_is_waited_for() -> None:
    calls = Rehearsal(EngineLoop, steps=3).run(4)
    in_turn = ["wait 0", "process 0", "launch 2", "wait 1", "process 1", "wait 2", "process 2"]
    assert calls == ["launch 0", "launch 1", *in_turn], "one step is ahead, and the oldest is finished first"


@pytest.mark.parametrize("error", [BROKEN, INTERRUPT], ids=["error", "interrupt"])
def test_a_launch_that_raises_fails_its_own_step_alone(error: BaseException) -> None:
    calls = Rehearsal(FailsWithoutRaising, 2, "launch 1", error).run(3)
    assert calls == ["launch 0", "launch 1", "fail 1", "wait 0", "process 0"], "step 0 is sound, and step 1 never began"


def test_when_the_engine_dies_at_a_launch_the_steps_in_flight_fail_first() -> None:
    calls = Rehearsal(FailsWithoutRaising, 2, "launch 1", DEAD).run(3)
    assert calls == ["launch 0", "launch 1", "fail 0", "fail 1"], "after `EngineDead` no step in flight has a result"


@pytest.mark.parametrize("error", [BROKEN, INTERRUPT, DEAD], ids=["error", "interrupt", "dead"])
def test_a_wait_that_raises_fails_its_step_and_then_those_launched_after_it(error: BaseException) -> None:
    calls = Rehearsal(FailsWithoutRaising, 3, "wait 0", error).run(4)
    later = ["launch 2", "wait 2", "process 2"]
    assert calls == ["launch 0", "launch 1", "wait 0", "fail 0", "fail 1", *later], "the oldest step fails first"


def test_an_observer_sees_each_phase_begin_before_it_and_end_after_it() -> None:
    rehearsal = Rehearsal(EngineLoop)
    rehearsal.loop.observers.append(cast(Any, rehearsal))
    expected = observed("launch 0", "launch 1", "wait 0", "process 0", "wait 1", "process 1")
    assert rehearsal.run(3) == expected, "each call stands between its `_begin` and its `_end`"


@pytest.mark.parametrize("phase", ["launch", "wait"])
def test_a_phase_that_raises_ends_before_its_step_fails(phase: str) -> None:
    rehearsal = Rehearsal(FailsWithoutRaising, 1, f"{phase} 0")
    rehearsal.loop.observers.append(cast(Any, rehearsal))
    phases = ["launch 0"] if phase == "launch" else ["launch 0", "wait 0"]
    assert rehearsal.run(2) == [*observed(*phases), "fail 0"], "an observer sees the end of a phase that raised, too"


def test_after_an_ordinary_error_the_loop_goes_on() -> None:
    rehearsal = Rehearsal(EngineLoop, 3, "wait 0")
    later = ["launch 2", "wait 2", "process 2"]
    calls = rehearsal.run(4)
    assert calls == ["launch 0", "launch 1", "wait 0", "fail 0", "fail 1", *later], "this error is not raised again"
    assert rehearsal.messages == ["the step failed: RuntimeError: broken"] * 2, "the message of each step that failed"


@pytest.mark.parametrize(
    ("broken", "error"),
    [("wait 0", INTERRUPT), ("wait 0", DEAD), ("launch 1", DEAD)],
    ids=["interrupt-wait", "dead-wait", "dead-launch"],
)
def test_an_interrupt_and_the_end_of_the_engine_are_raised_when_all_steps_have_failed(
    broken: str, error: BaseException
) -> None:
    rehearsal = Rehearsal(EngineLoop, 2, broken, error)
    before = ["launch 0", "launch 1"] if broken == "launch 1" else ["launch 0", "launch 1", "wait 0"]
    calls, raised = rehearsal.run(2), f"raise {type(error).__name__}"
    assert calls == [*before, "fail 0", "fail 1", raised], "first all fail, the oldest first, and then it is raised"
    message = "interrupted" if error is INTERRUPT else "the step failed: EngineDead: gone"
    assert rehearsal.messages == [message] * 2, "the message of each step that failed"


def test_an_observer_sees_each_step_that_fails() -> None:
    rehearsal = Rehearsal(EngineLoop, 2, "wait 0")
    rehearsal.loop.observers.append(cast(Any, rehearsal))
    expected = observed("launch 0", "launch 1", "wait 0", "fail 0", "fail 1")
    assert rehearsal.run(2) == expected, "each `fail` stands between its `_begin` and its `_end`"
