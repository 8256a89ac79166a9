"""Sliding windows in all layers: pages that lie outside go back while a request runs, and nothing reads them again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.prefix import InsertResult
from minisgl.kvcache.sizing import most_pages
from minisgl.request import FinishReason, Request
from minisgl.scheduler.policy import Policies
from tests.drafting import KnowsTheShadow
from tests.scheduler.harness import DELAYS, Harness
from tests.scheduler.test_preemption import Bold

CACHES = ["radix", "block-hash", "none"]
WINDOW = 8


def windowed(**options: Any) -> Harness:
    """A pool of 48 positions, in pages of four."""
    return Harness(**{"page_size": 4, "num_pages": 12, "max_seq_len": 256, "window": WINDOW, **options})


def held(harness: Harness, request: Request) -> int:
    return len(harness.memory.row(request.slot))


def computed_by(harness: Harness, slot: int = 0) -> int:
    """Positions whose steps are processed, of a row that decodes."""
    return int(harness.table.known_len[slot]) - 1


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("drafter", [None, KnowsTheShadow])
def test_an_answer_may_be_longer_than_the_pool(cache: str, delay: int, drafter: type[KnowsTheShadow] | None) -> None:
    harness = windowed(prefix_cache=cache, delay=delay, drafter=drafter)
    request = harness.add([0, 1, 2] * 3, max_tokens=200)
    most = 0
    while not request.finish_reason:
        harness.step()
        if request.slot >= 0:
            most = max(most, held(harness, request))
    assert request.finish_reason is FinishReason.LENGTH
    harness.assert_output(request)
    assert most <= most_pages(9, 209, 4, WINDOW, 0 if drafter is None else 3) < 12
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("drafts", [1, 40, 64])
def test_a_row_holds_no_more_than_it_may_however_far_drafts_are_ahead(drafts: int, delay: int) -> None:
    harness = windowed(num_pages=60, drafter=KnowsTheShadow, num_draft_tokens=drafts, delay=delay, prefix_cache="none")
    request = harness.add([0], max_tokens=200)
    most = 0
    while not request.finish_reason:
        harness.step()
        if request.slot >= 0:
            most = max(most, held(harness, request))
    harness.assert_output(request)
    assert most > drafts // 4, "drafts need pages of their own"
    assert most <= most_pages(1, 201, 4, WINDOW, drafts) == harness.memory.most_pages(1, 201)


def test_without_a_window_the_same_answer_outgrows_the_pool() -> None:
    harness = windowed(window=None)
    request = harness.add([0, 1, 2] * 3, max_tokens=200)
    harness.run()
    assert request.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("delay", DELAYS)
def test_a_row_keeps_what_its_next_query_sees(delay: int) -> None:
    """After each step: all pages from the window's first position on, and none before."""
    harness = windowed(prefix_cache="none", delay=delay)
    request = harness.add([0] * 9, max_tokens=40)
    while not request.finish_reason:
        harness.step()
        if request.slot >= 0:
            next_query = int(harness.table.known_len[request.slot]) - 1
            if next_query > 9:  # the prefill is complete
                first_page = max(next_query + 1 - WINDOW, 0) // 4
                assert held(harness, request) == int(harness.table.num_pages[request.slot]) - first_page


def test_pages_go_back_between_the_chunks_of_a_prompt() -> None:
    harness = windowed(prefix_cache="none", max_prefill_tokens=8)
    request = harness.add([0, 1] * 20, max_tokens=4)
    free = []
    for _ in range(5):
        harness.step()
        free.append(harness.memory.pool.num_free)
    # After each chunk, the window's 8 positions end with the next query's, so seven of those computed are seen again.
    assert free == [2, 2 + 2, 2 + 4, 2 + 6, 2 + 8]
    harness.run()
    harness.assert_output(request)


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
@pytest.mark.parametrize("delay", DELAYS)
def test_a_cached_prefix_is_let_go_when_the_window_has_passed_all_of_it(cache: str, delay: int) -> None:
    harness = windowed(prefix_cache=cache, delay=delay)
    first, second = (harness.add([0, 1, 2] * 4 + [seed], max_tokens=60) for seed in (0, 1))
    while computed_by(harness) < 30:
        harness.step()
        assert harness.memory.cache.num_evictable == (3 if computed_by(harness) >= 12 + WINDOW - 1 else 0)
    assert max(held(harness, request) for request in (first, second)) <= 3
    third = harness.add([0, 1, 2] * 4, max_tokens=4)
    harness.run()
    assert third.cached_tokens == 8
    for request in (first, second, third):
        harness.assert_output(request)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
def test_an_answer_is_published_only_if_its_start_is_there(cache: str) -> None:
    lengths = []
    for max_tokens in (WINDOW - 1, 3 * WINDOW):
        harness = windowed(prefix_cache=cache)
        request = harness.add([0, 1, 2] * 4 + [1], max_tokens=max_tokens)
        harness.run()
        harness.assert_output(request)
        match = harness.memory.cache.match(request.tokens())
        lengths.append(4 * len(match.pages))
    assert lengths == [(13 + WINDOW - 2) // 4 * 4, 12]


@pytest.mark.parametrize("delay", DELAYS)
def test_a_request_that_has_outgrown_the_pool_is_not_preempted(delay: int) -> None:
    """It could not be computed again, so the one before it gives way."""
    policies = Policies(admission=Bold())
    harness = windowed(prefix_cache="none", num_pages=5, delay=delay, policies=policies)
    early, long = harness.add([0, 2], max_tokens=18), harness.add([1, 0] * 7, max_tokens=100)
    harness.run()
    assert (early.preemptions > 0, long.preemptions) == (True, 0)
    for request in (early, long):
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)
    harness.assert_idle_and_clean()


def test_if_none_could_be_computed_again_the_last_to_come_ends() -> None:
    harness = windowed(policies=Policies(admission=Bold()))
    first, second = (harness.add([seed], max_tokens=120) for seed in (0, 1))
    while computed_by(harness) < 60 or held(harness, first) > 2:
        harness.step()
    # In the one step in which both rows have a page less than they need in others, somebody else takes those.
    harness.add([2] * 29, max_tokens=1)
    harness.step()
    pinned = harness.memory.lock_prefix(np.full(29, 2, dtype=np.int32))
    assert len(pinned.pages) == 7, "of the pool's 12, and the rows need three each"
    harness.run()
    harness.memory.unlock_prefix(pinned)
    assert first.finish_reason is FinishReason.LENGTH
    assert second.finish_reason is FinishReason.ERROR
    assert "outgrew the KV cache" in (second.error or "")
    for request in (first, second):
        harness.assert_output(request)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
def test_reserved_memory_suffices(cache: str, delay: int) -> None:
    """With pages for the most that each will hold at a time, several long answers run together and none gives way."""
    options = {"num_pages": 40, "admission_policy": "reserve"}
    harness = windowed(prefix_cache=cache, delay=delay, **options)
    requests = [harness.add([seed, 2, seed] * 3, max_tokens=170) for seed in range(3)]
    together = 0
    while harness.scheduler.has_work:
        harness.step()
        together = max(together, len(harness.table.slots))
    assert together == 3
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        assert request.preemptions == 0
        harness.assert_output(request)


def test_the_ledger_notices_pages_that_went_back_too_early_or_not_at_all() -> None:
    harness = windowed(prefix_cache="none")
    request = harness.add([0] * 20, max_tokens=40)
    harness.step()
    harness.step()
    memory, slot = harness.memory, request.slot
    memory.check()
    memory.page_table.rows[slot, 0] = 3
    with pytest.raises(InvariantError, match="still maps"):
        memory.check()
    memory.page_table.rows[slot, 0] = memory.page_table.dummy_page
    memory.give_back(np.array([slot], dtype=np.int32), np.array([30], dtype=np.int32))
    with pytest.raises(InvariantError, match="still reads"):
        memory.check()


@pytest.mark.parametrize("delay", DELAYS)
def test_pages_that_the_cache_refuses_go_back_while_a_prompt_is_computed(
    delay: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All blocks collide, so only one is cached. A row without its start offers no page any more."""
    monkeypatch.setattr(BlockHashCache, "hash_block", staticmethod(lambda parent_key, tokens: 7))
    harness = windowed(prefix_cache="block-hash", delay=delay, max_prefill_tokens=8)
    requests = [harness.add([0, 1] * 20, max_tokens=30), harness.add([0, 1] * 18, max_tokens=60)]
    harness.run()
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)
    assert harness.memory.cache.num_pages == 1
    harness.assert_idle_and_clean()


def test_a_row_without_its_start_takes_no_pages_from_the_cache_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache refuses what it offers, so it goes back; then the cache has the same prefix from elsewhere."""
    harness = windowed(num_pages=20, max_prefill_tokens=8)
    memory = harness.memory
    nothing = memory.cache.match(np.zeros(0, dtype=np.int32))
    monkeypatch.setattr(memory.cache, "insert", lambda tokens, pages: InsertResult(nothing.pages, nothing.handle))
    request = harness.add([0, 1] * 20, max_tokens=10)
    harness.step()
    harness.step()
    assert held(harness, request) == 10 - 2
    monkeypatch.undo()
    pages = memory.alloc(6)
    memory.cache.insert(request.prompt[:24], pages)
    memory.is_cached[pages] = True
    harness.run()
    harness.assert_output(request)
    harness.assert_idle_and_clean()
