"""Where steps overlap, the host sees each token a step late, and a mask is made of what the host has seen."""

from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

from minisgl.core import FinishReason
from tests.scheduler.harness import Harness

NEVER_DONE = 3
"""Seed of a rule without an end."""


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
