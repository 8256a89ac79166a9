"""Who waits for whom: patience of prefill-first, static batching, passing over and being passed over."""

from __future__ import annotations

import pytest

from minisgl.errors import QueueFull
from minisgl.request import FinishReason, Request, RequestState
from minisgl.scheduler.policy import MAX_BYPASS, PrefillFirst
from minisgl.scheduler.scheduler import LOOKAHEAD
from tests.scheduler.harness import Harness


def phases(harness: Harness) -> str:
    """One letter a step: p for prefill, d for decode, m for both."""
    return "".join(
        "p" if batch.num_decode == 0 else "d" if batch.num_decode == batch.num_rows else "m"
        for batch in harness.batches
    )


def test_prefill_first_lets_decodes_through_after_its_patience() -> None:
    harness = Harness(max_prefill_tokens=4, prefix_cache="none", num_pages=512, max_running=64)
    decoding = harness.add([1] * 4, max_tokens=4)
    for _ in range(30):
        harness.add([2] * 4, max_tokens=1)
    harness.run()
    stretch = "p" * PrefillFirst.patience + "d"
    assert phases(harness).startswith(stretch * 3)
    harness.assert_output(decoding)


def test_mixed_steps_never_leave_a_decode_row_out() -> None:
    harness = Harness(max_prefill_tokens=4, prefix_cache="none", num_pages=512, batch_policy="mixed")
    first = harness.add([1] * 4, max_tokens=10)
    for _ in range(4):
        harness.add([2] * 9, max_tokens=1)
    harness.run()
    assert phases(harness) == "p" + "m" * 9
    assert all(batch.slots[0] == harness.batches[0].slots[0] for batch in harness.batches)
    harness.assert_output(first)


def test_static_batches_start_when_the_one_before_is_done() -> None:
    harness = Harness(batch_policy="static", max_running=3, max_prefill_tokens=6, prefix_cache="none")
    requests = [harness.add([i % 3] * 4, max_tokens=2 + 3 * (i % 3)) for i in range(7)]
    batches_of: list[set[int]] = []
    while harness.scheduler.has_work:
        batch_count = len(harness.batches)
        harness.step()
        if len(harness.batches) > batch_count and harness.batches[-1].new_requests:
            running = {r.uid for r in requests if r.state in (RequestState.PREFILL, RequestState.DECODE)}
            batches_of.append(running)
    assert {0, 1, 2} in batches_of
    assert {3, 4, 5} in batches_of
    assert {6} in batches_of
    assert not any(running & {0, 1, 2} and running & {3, 4, 5} for running in batches_of)
    # Prefill in two steps, then as many decodes as the longest of the batch needs.
    assert phases(harness) == "ppddddddd" + "ppddddddd" + "pd"


def test_a_large_request_does_not_block_the_head_of_the_line() -> None:
    harness = Harness(num_pages=10, page_size=4, prefix_cache="none")
    running = harness.add([0] * 20, max_tokens=10)
    large = harness.add([1] * 36, max_tokens=2)
    small = [harness.add([2] * 4, max_tokens=1) for _ in range(3)]
    while not all(request.state is RequestState.FINISHED for request in small):
        assert running.state is not RequestState.FINISHED
        harness.step()
    assert large.state is RequestState.WAITING
    assert large.bypassed == 3
    harness.run()
    harness.assert_output(large)


def test_a_large_request_is_passed_over_only_so_often() -> None:
    harness = Harness(num_pages=10, page_size=4, prefix_cache="none", max_seq_len=256)
    large: Request | None = None
    admitted_after = 0
    small: list[Request] = []
    for _ in range(1000):
        while len(harness.scheduler.waiting) < 4:  # a stream of small requests that never runs dry
            small.append(harness.add([2] * 4, max_tokens=2 + len(small) % 4))
            if large is None:
                large = harness.add([1] * 36, max_tokens=2)
        harness.step()
        assert large is not None
        if large.state is not RequestState.WAITING:
            break
        admitted_after = sum(r.state is not RequestState.WAITING for r in small)
    assert large is not None
    assert large.state is not RequestState.WAITING
    assert large.bypassed == MAX_BYPASS
    assert admitted_after <= MAX_BYPASS + 4
    harness.assert_output(large)


def test_a_step_looks_past_a_few_that_do_not_fit_and_no_further() -> None:
    harness = Harness(num_pages=10, page_size=4, prefix_cache="none")
    harness.add([0] * 20, max_tokens=12)
    for _ in range(LOOKAHEAD):
        harness.add([1] * 36, max_tokens=2)
    hidden = harness.add([2] * 4, max_tokens=1)
    for _ in range(5):
        harness.step()
    assert hidden.state is RequestState.WAITING


def test_nobody_newer_takes_the_pages_that_a_preempted_request_waits_for() -> None:
    harness = Harness(num_pages=5, page_size=4, prefix_cache="none")
    old, young = harness.add([0] * 8, max_tokens=12), harness.add([1] * 8, max_tokens=6)
    while young.state is not RequestState.PREEMPTED:
        harness.step()
    newcomer = harness.add([2], max_tokens=2)
    while young.state is RequestState.PREEMPTED:
        assert newcomer.state is RequestState.WAITING
        harness.step()
    harness.run()
    for request in (old, young, newcomer):
        harness.assert_output(request)


def test_the_queue_is_bounded_and_preempted_requests_always_return() -> None:
    harness = Harness(max_queued=2, max_running=2, num_pages=5, page_size=4, prefix_cache="none")
    running = [harness.add([i] * 8, max_tokens=8) for i in range(2)]
    harness.step()
    waiting = [harness.add([2] * 4, max_tokens=1) for _ in range(2)]
    with pytest.raises(QueueFull, match="2 requests are waiting already"):
        harness.add([1] * 4)
    harness.check()
    while running[1].state is not RequestState.PREEMPTED:
        harness.step()
    assert len(harness.scheduler.waiting) == 3
    harness.run()
    for request in running + waiting:
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)


def test_a_stream_of_longer_prefixes_starves_nobody() -> None:
    harness = Harness(queue_policy="lpm", max_running=1, num_pages=64)
    harness.add([1] * 17, max_tokens=1)
    harness.run()
    harness.add([1] * 17, max_tokens=1)
    cold = harness.add([0] * 17, max_tokens=1)
    for _ in range(MAX_BYPASS + 2):
        assert cold.state is RequestState.WAITING
        harness.add([1] * 17, max_tokens=1)
        harness.step()
    assert cold.bypassed == MAX_BYPASS
    assert cold.finish_reason is FinishReason.LENGTH


def test_longest_prefix_first() -> None:
    harness = Harness(queue_policy="lpm", max_running=1, num_pages=64)
    warm = harness.add([1] * 17, max_tokens=1)
    harness.run()
    cold, hot = harness.add([0] * 17, max_tokens=1), harness.add([1] * 17, max_tokens=1)
    harness.step()
    assert hot.state is RequestState.FINISHED
    assert hot.cached_tokens == 16
    assert cold.state is RequestState.WAITING
    harness.run()
    for request in (warm, cold, hot):
        harness.assert_output(request)
