"""What happens when memory runs out: who gives way, who comes back first, and what is never lost."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from minisgl.batch import Batch
from minisgl.request import FinishReason, Request, RequestState
from minisgl.scheduler.policy import MemoryDemand
from tests.scheduler.harness import DELAYS, Harness

CACHES = ["radix", "block-hash", "none"]


class Bold:
    """An admission policy without any caution."""

    def can_admit(self, demand: MemoryDemand) -> bool:
        return True


def different(length: int, seed: int) -> list[int]:
    """Prompts that share no page."""
    return [seed] * length


def run_until_preempted(harness: Harness, limit: int = 100) -> None:
    for _ in range(limit):
        harness.step()
        if harness.scheduler.waiting.preempted:
            return
    raise AssertionError("nothing was preempted")


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
def test_the_last_to_come_gives_way_and_returns_first(cache: str, delay: int) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, num_pages=9, max_running=3, delay=delay)
    first, second, third = (harness.add(different(8, seed), max_tokens=12) for seed in range(3))
    newcomer = harness.add(different(4, 4), max_tokens=2)
    run_until_preempted(harness)
    assert (first.preemptions, second.preemptions, third.preemptions) == (0, 0, 1)
    assert third.state is RequestState.PREEMPTED
    assert next(iter(harness.scheduler.waiting)) is third
    assert newcomer in harness.scheduler.waiting
    kept = len(third.output)
    assert kept > 0
    harness.run()
    for request in (first, second, third, newcomer):
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)
    # Tokens that were generated are not generated again: the returning row starts behind them.
    sampled = [
        (slot, index)
        for batch in harness.batches
        for slot, index in zip(batch.slots[batch.sample_rows].tolist(), batch.output_index.tolist(), strict=True)
    ]
    assert len(sampled) == sum(len(r.output) for r in (first, second, third, newcomer))
    harness.assert_idle_and_clean()


def test_a_preempted_request_is_fed_its_output_again() -> None:
    harness = Harness(prefix_cache="none", page_size=4, num_pages=5, max_running=2)
    _, second = (harness.add(different(8, seed), max_tokens=8) for seed in range(2))
    run_until_preempted(harness)
    kept = list(second.output)
    harness.run()
    returned = [a for batch in harness.batches for a in batch.new_requests if len(a.tokens) > 8]
    assert [a.tokens.tolist() for a in returned] == [different(8, 1) + kept]
    assert [a.prompt_len for a in returned] == [8]


def test_what_a_preempted_request_computed_is_found_again() -> None:
    """With a prefix cache, recomputing costs only what was evicted in the meantime."""
    fed = {}
    for cache in CACHES:
        harness = Harness(prefix_cache=cache, page_size=4, num_pages=7, max_running=2)
        requests = [harness.add(different(8, 0), max_tokens=7), harness.add(different(8, 1), max_tokens=16)]
        run_until_preempted(harness)
        harness.run()
        for request in requests:
            harness.assert_output(request)
        fed[cache] = harness.executor.fed_tokens
    assert fed["radix"] == fed["block-hash"] < fed["none"]


def test_the_victim_is_a_plain_int() -> None:
    harness = Harness()
    for seed in range(3):
        harness.add(different(8, seed), max_tokens=8)
    harness.step()
    victim = harness.scheduler._victim()
    assert type(victim) is int, f"{victim!r} is a {type(victim).__name__}; make it an `int`"
    assert victim == harness.table.slots[-1], "the slot of the last to arrive"


class SeesWhoWaits:
    """An observer that notes after each phase whether a request waits, from when it has been preempted."""

    def __init__(self, harness: Harness, request: Request) -> None:
        self.harness, self.request, self.notes = harness, request, list[tuple[str, bool]]()

    def begin(self, phase: str, batch: Batch | None) -> None:
        pass

    def end(self, phase: str, batch: Batch | None) -> None:
        if self.request.preemptions:
            self.notes.append((phase, self.request in self.harness.scheduler.waiting))

    def finish(self, requests: Sequence[Request]) -> None:
        pass


def test_a_preempted_request_waits_only_once_its_step_in_flight_is_done() -> None:
    harness = Harness(prefix_cache="none", page_size=4, num_pages=5, max_running=2, delay=1)
    _, second = (harness.add(different(8, seed), max_tokens=8) for seed in range(2))
    watching = SeesWhoWaits(harness, second)
    harness.loop.observers.append(watching)
    run_until_preempted(harness)
    expected = [("schedule", False), ("launch", False), ("wait", False), ("process", True)]
    assert watching.notes == expected, "the phases since it was preempted, and whether it waits after each"


def test_the_row_that_grows_gives_way_itself_if_it_is_the_last() -> None:
    """Older rows are never preempted for a younger one."""
    harness = Harness(
        prefix_cache="none", page_size=4, num_pages=5, admission_policy="tests.scheduler.test_preemption:Bold"
    )
    old = harness.add(different(9, 0), max_tokens=4)  # three pages, enough to the end
    young = harness.add(different(8, 1), max_tokens=8)  # two pages, needs a third at once
    run_until_preempted(harness)
    assert (old.preemptions, young.preemptions) == (0, 1)
    harness.run()
    harness.assert_output(old)
    harness.assert_output(young)


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_that_outgrows_the_pool_alone_ends_with_an_error(cache: str) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, num_pages=3, admission_policy="optimistic")
    greedy, modest = harness.add(different(8, 0), max_tokens=20), harness.add(different(3, 1), max_tokens=3)
    harness.run()
    assert greedy.finish_reason is FinishReason.ERROR
    assert "outgrew the KV cache (3 pages of 4 tokens)" in (greedy.error or "")
    assert len(greedy.output) == 5  # twelve positions have room; the token after the last needs none
    assert modest.finish_reason is FinishReason.LENGTH
    harness.assert_output(greedy)
    harness.assert_output(modest)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", CACHES)
def test_a_request_may_fill_the_pool_to_the_last_position(cache: str) -> None:
    for admission in ("optimistic", "reserve"):
        harness = Harness(prefix_cache=cache, page_size=4, num_pages=3, admission_policy=admission)
        request = harness.add(different(8, 0), max_tokens=5)
        harness.run()
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)


@pytest.mark.parametrize("cache", CACHES)
def test_a_prompt_larger_than_the_pool_is_refused_while_others_run(cache: str) -> None:
    harness = Harness(prefix_cache=cache, page_size=4, num_pages=4)
    before, giant, after = (harness.add(different(n, n), max_tokens=4) for n in (6, 17, 7))
    harness.step()
    assert giant.finish_reason is FinishReason.ERROR
    assert "17 tokens" in (giant.error or "")
    assert "4 pages of 4 tokens" in (giant.error or "")
    harness.run()
    harness.assert_output(before)
    harness.assert_output(after)
    assert after.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("cache", CACHES)
def test_reserve_never_preempts_where_optimistic_does(cache: str, delay: int) -> None:
    preemptions = {}
    for admission in ("reserve", "optimistic"):
        harness = Harness(
            prefix_cache=cache, page_size=2, num_pages=20, admission_policy=admission, delay=delay, max_prefill_tokens=9
        )
        requests = [harness.add([i % 2] * (1 + i % 7), max_tokens=5 + i % 13) for i in range(40)]
        harness.run()
        for request in requests:
            assert request.finish_reason is FinishReason.LENGTH
            harness.assert_output(request)
        preemptions[admission] = sum(request.preemptions for request in requests)
    assert preemptions["reserve"] == 0
    assert preemptions["optimistic"] > 0


def test_reserve_runs_fewer_at_a_time() -> None:
    most = {}
    for admission in ("reserve", "optimistic"):
        harness = Harness(page_size=2, num_pages=20, admission_policy=admission, prefix_cache="none")
        for i in range(10):
            harness.add(different(4, i % 3), max_tokens=12)
        harness.run()
        most[admission] = max(batch.num_rows for batch in harness.batches)
    assert most["reserve"] == 2  # 15 positions are 8 pages
    assert most["optimistic"] > 2


def test_the_youngest_of_several_preempted_does_not_overtake() -> None:
    harness = Harness(prefix_cache="none", page_size=2, num_pages=12, max_running=6)
    requests = [harness.add(different(2, i % 3), max_tokens=10) for i in range(6)]
    most_waiting = 0
    while harness.scheduler.has_work:
        harness.step()
        waiting = [request.uid for request in harness.scheduler.waiting]
        assert waiting == sorted(waiting)
        most_waiting = max(most_waiting, len(harness.scheduler.waiting.preempted))
    assert most_waiting > 1
    for request in requests:
        harness.assert_output(request)
