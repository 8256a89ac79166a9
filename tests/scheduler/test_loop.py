"""One step in flight: what is launched when, and whom a failure takes with it. Random lives are in `test_fuzz`."""

from __future__ import annotations

import pytest

from minisgl.request import FinishReason
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
    assert seen == [(1, 0), (2, 1), (3, 2), (3, 3)]
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
