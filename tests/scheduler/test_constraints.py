"""Constrained rows: each token is sampled under the mask of its own place, whenever rows run; others do not notice."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest

from minisgl.request import FinishReason, Request
from tests.fake_executor import Fault
from tests.rule import Rule
from tests.scheduler.harness import DELAYS, Harness

NEVER_DONE = 3
"""Seed of a rule without an end."""
POLICIES = ["prefill-first", "mixed", "static"]


def run_many(**options: Any) -> list[Request]:
    """Prompts in chunks and more requests than slots, two thirds of them constrained. Each must get its own answer."""
    harness = Harness(page_size=2, max_running=3, max_prefill_tokens=4, vocab=7, **options)
    requests = []
    for seed in range(20):
        prompt = [seed % 7, 1, 2, 3, seed % 5][: 1 + seed % 5]
        rule = seed if seed % 3 else None
        requests.append(harness.add(prompt, 1 + seed % 9, (seed % 7,) if seed % 4 == 0 else (), rule, watched=True))
    harness.run()
    for request in requests:
        assert request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        harness.assert_output(request)
    assert {request.finish_reason for request in requests if request.constraint} == {"stop", "length"}
    harness.assert_idle_and_clean()
    return requests


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("batch_policy", POLICIES)
def test_every_output_obeys_its_rule(delay: int, batch_policy: str) -> None:
    assert sum(request.preemptions for request in run_many(delay=delay, batch_policy=batch_policy)) == 0


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("batch_policy", POLICIES)
def test_a_preempted_request_goes_on_in_its_rule(delay: int, batch_policy: str) -> None:
    requests = run_many(delay=delay, batch_policy=batch_policy, num_pages=7)
    assert any(request.preemptions for request in requests if request.constraint)


@pytest.mark.parametrize("delay", DELAYS)
def test_unconstrained_requests_cost_no_masks_and_constrained_ones_a_call_a_step(delay: int) -> None:
    harness = Harness(delay=delay, max_prefill_tokens=64)
    harness.add([1], max_tokens=5)
    harness.run()
    assert harness.make_masks.calls == []
    for _ in range(3):
        harness.add([1, 2], max_tokens=6, rule=NEVER_DONE)
    made = 0
    while harness.scheduler.has_work:
        made += harness.step().constrained_rows
    masked = [len(batch.mask_rows) for batch in harness.batches]
    assert harness.make_masks.calls == [rows for rows in masked if rows] == [3] * 6
    assert made == 18
    assert all(len(batch.masks) == len(batch.mask_rows) for batch in harness.batches)


def test_a_chunk_that_samples_nothing_has_no_mask() -> None:
    harness = Harness(max_prefill_tokens=4)
    harness.add([1] * 10, max_tokens=2, rule=NEVER_DONE)
    harness.run()
    assert [batch.mask_rows.tolist() for batch in harness.batches] == [[], [], [0], [0]]


def test_masks_belong_to_sampling_rows() -> None:
    """The first row's chunk is not its last, so the second row is sampling row 0."""
    harness = Harness(max_prefill_tokens=6, batch_policy="mixed")
    harness.add([2, 1], max_tokens=4)
    harness.step()
    harness.add([1] * 9, max_tokens=2)
    harness.add([2] * 2, max_tokens=2, rule=NEVER_DONE)
    harness.step()
    harness.step()
    batch = harness.batches[-1]
    assert batch.slots[batch.sample_rows].tolist() == [0, 1, 2]
    assert batch.mask_rows.tolist() == [2]
    harness.run()


@pytest.mark.parametrize("delay", DELAYS)
def test_a_broken_constraint_ends_its_own_request_with_its_error(delay: int) -> None:
    harness = Harness(delay=delay)
    others = [harness.add([1, 2], max_tokens=9), harness.add([1, 2], max_tokens=9, rule=NEVER_DONE)]
    broken = harness.add([1, 2], max_tokens=9, rule=NEVER_DONE, breaks_at=3)
    harness.run()
    assert (broken.finish_reason, broken.error) == (FinishReason.ERROR, "the rule is broken")
    assert len(broken.output) == 3
    for other in others:
        assert other.finish_reason is FinishReason.LENGTH
        harness.assert_output(other)
    harness.assert_idle_and_clean()


def test_an_error_ends_the_request_of_its_row_wherever_that_stands() -> None:
    harness = Harness()
    first = harness.add([1, 2], max_tokens=1)
    harness.add([1, 2], max_tokens=9)
    broken = harness.add([1, 2], max_tokens=9, rule=NEVER_DONE, breaks_at=3)
    other = harness.add([1, 2], max_tokens=3, rule=NEVER_DONE)
    harness.run()
    assert first.finish_reason is FinishReason.LENGTH, "from then on, no row has the number of its slot"
    assert (broken.finish_reason, broken.error) == (FinishReason.ERROR, "the rule is broken")
    assert (other.finish_reason, other.error) == (FinishReason.LENGTH, None)


@pytest.mark.parametrize("delay", DELAYS)
def test_an_abort_and_a_failure_between_a_row_and_its_mask(delay: int) -> None:
    for steps in range(5):
        harness = Harness(delay=delay)
        aborted, failed = (harness.add([1, seed], max_tokens=9, rule=NEVER_DONE) for seed in (1, 2))
        for _ in range(steps):
            harness.step()
        harness.abort(aborted)
        harness.faulty.fault = Fault(at_launch=False, error=RuntimeError("broken"))
        harness.run()
        assert aborted.finish_reason is FinishReason.ABORT
        assert failed.finish_reason is FinishReason.ERROR
        for request in (aborted, failed):
            harness.assert_output(request)
        harness.assert_idle_and_clean()


def test_a_slot_forgets_the_constraint_of_its_last_request() -> None:
    harness = Harness(max_running=1)
    constrained, free = harness.add([1, 2], rule=NEVER_DONE), harness.add([1, 2])
    harness.run()
    assert isinstance(constrained.constraint, Rule)
    assert len(constrained.constraint.accepted) == 4
    assert len(harness.make_masks.calls) == 4
    harness.assert_output(free)


def uids(harness: Harness) -> list[list[int]]:
    """Which requests were in each step. No request may have left its slot to another."""
    return [harness.table.arrival[batch.slots].tolist() for batch in harness.batches]


def test_a_row_sits_out_while_its_token_is_sampled_and_others_do_not() -> None:
    harness = Harness(delay=1)
    harness.add([1, 2], max_tokens=7)
    harness.add([2, 1], max_tokens=3, rule=NEVER_DONE)
    harness.run()
    assert uids(harness) == [[0, 1], [0], [0, 1], [0], [0, 1], [0], [0]]


def test_alone_they_run_together_and_one_step_at_a_time() -> None:
    """A second request came a step later; from its first token on they share their steps."""
    harness = Harness(delay=1)
    harness.add([1, 2], max_tokens=5, rule=NEVER_DONE)
    harness.step()
    harness.add([2, 1], max_tokens=4, rule=NEVER_DONE)
    harness.run()
    assert uids(harness) == [[0], [1], [0, 1], [0, 1], [0, 1], [0]]


def test_rows_out_of_step_wait_for_each_other_beside_others_too() -> None:
    harness = Harness(delay=1, batch_policy="mixed")
    harness.add([1], max_tokens=20)
    harness.add([2], max_tokens=20, rule=NEVER_DONE)
    harness.step()
    harness.add([2, 1], max_tokens=20, rule=NEVER_DONE)
    for _ in range(9):
        harness.step()
    assert uids(harness) == [[0, 1], [0, 2], [0], *[[0, 1, 2], [0]] * 3, [0, 1, 2]]


def test_new_requests_do_not_hold_up_the_running_ones() -> None:
    """Each step samples the first token of a new constrained request: there is always one to wait for."""
    harness = Harness(delay=1, batch_policy="mixed", max_running=64, max_seq_len=64)
    first = harness.add([1], max_tokens=10, rule=NEVER_DONE)
    for _ in range(25):
        harness.step()
        harness.add([2, 1], max_tokens=30, rule=NEVER_DONE)
    assert first.finish_reason is FinishReason.LENGTH
    harness.run()


def test_a_finished_rule_ends_its_request_before_another_step() -> None:
    harness = Harness(delay=1)
    seed = next(s for s in range(100) if _length(s) == 4)
    request = harness.add([1, 2], max_tokens=30, rule=seed)
    harness.run()
    assert request.finish_reason is FinishReason.STOP
    assert len(request.output) == len(harness.batches) == 4
    harness.assert_output(request)


def test_a_token_that_arrives_after_its_request_was_preempted_is_accepted_once() -> None:
    in_flight = []
    for prompt_len in range(1, 8):
        harness = Harness(num_pages=8, page_size=2, delay=1)
        first = harness.add([1, 2, 0, 1, 1, 0, 2][:prompt_len], max_tokens=8)
        last = harness.add([0, 1, 2, 2], max_tokens=8, rule=NEVER_DONE)
        preempt = harness.scheduler._preempt

        def preempt_and_note(slot: int, harness: Harness = harness, preempt: Callable[[int], None] = preempt) -> None:
            in_flight.append(int(harness.table.in_flight[slot]))
            preempt(slot)

        with patch.object(harness.scheduler, "_preempt", preempt_and_note):
            harness.run()
        for request in (first, last):
            assert request.finish_reason is FinishReason.LENGTH
            harness.assert_output(request)
    assert 1 in in_flight


def _length(seed: int) -> int:
    """How many tokens a request with a rule of that seed generates after the prompt [1, 2]."""
    harness = Harness()
    request = harness.add([1, 2], max_tokens=30, rule=seed)
    harness.run()
    return len(request.output)
