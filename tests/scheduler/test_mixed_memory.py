"""Layers of both kinds: window pages go back while a request runs, and a hit on a page without one reads nothing."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache.sizing import most_window_pages
from minisgl.kvcache.window_pages import NOWHERE
from minisgl.request import FinishReason, Request
from minisgl.scheduler.mixed_memory import MixedMemory
from minisgl.scheduler.policy import Policies
from tests.drafting import KnowsTheShadow
from tests.scheduler.harness import DELAYS, Harness
from tests.scheduler.test_preemption import Bold

CACHES = ["radix", "block-hash", "none"]
WINDOW = 8
LEAST = int(most_window_pages(256, 4, WINDOW))


def mixed(num_window_pages: int = LEAST, **options: Any) -> Harness:
    """256 positions in pages of four, and as many window pages as one request needs."""
    sizes = {"page_size": 4, "num_pages": 64, "max_seq_len": 256, "window": WINDOW}
    return Harness(**{**sizes, "num_window_pages": num_window_pages, **options})


def memory_of(harness: Harness) -> MixedMemory:
    assert isinstance(harness.memory, MixedMemory)
    return harness.memory


def held(harness: Harness) -> int:
    """Window pages that rows hold."""
    return int((memory_of(harness).windows.holders > 0).sum())


def finish(harness: Harness, *requests: Request) -> None:
    harness.run()
    for request in requests:
        assert request.finish_reason is FinishReason.LENGTH
        harness.assert_output(request)
    harness.assert_idle_and_clean()


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("drafter", [None, KnowsTheShadow])
def test_prompt_and_answer_may_be_longer_than_all_window_pages(
    cache: str, delay: int, drafter: type[KnowsTheShadow] | None
) -> None:
    harness = mixed(prefix_cache=cache, delay=delay, drafter=drafter)
    request = harness.add([0, 1, 2] * 40, max_tokens=100)
    most = 0
    while not request.finish_reason:
        harness.step()
        most = max(most, held(harness))
    assert most <= LEAST == 4 < harness.memory.pages_for(120)
    finish(harness, request)


@pytest.mark.parametrize("delay", DELAYS)
def test_a_row_holds_what_its_next_query_sees_and_all_of_its_pages(delay: int) -> None:
    harness = mixed(prefix_cache="none", delay=delay)
    request = harness.add([0] * 9, max_tokens=60)
    while not request.finish_reason:
        harness.step()
        if request.slot >= 0 and harness.table.known_len[request.slot] > 10:
            next_query, pages = int(harness.table.known_len[request.slot]) - 1, len(harness.memory.row(request.slot))
            assert pages == harness.memory.pages_for(int(harness.table.kv_len[request.slot]))
            assert held(harness) == pages - max(next_query + 1 - WINDOW, 0) // 4
    finish(harness, request)


@pytest.mark.parametrize("cache", ["radix", "block-hash"])
@pytest.mark.parametrize("delay", DELAYS)
def test_a_hit_ends_where_the_last_window_is_complete(cache: str, delay: int) -> None:
    """The first prompt's end is still there, its middle isn't, and its beginning needs nothing before it."""
    harness = mixed(prefix_cache=cache, delay=delay, num_window_pages=LEAST + 4)
    prompt = [0, 1, 2, 2] * 20
    first = harness.add(prompt, max_tokens=1)
    finish(harness, first)
    windows = memory_of(harness).windows
    pages = harness.memory.cache.match(first.prompt).pages
    with_window = windows.of_page[pages] != NOWHERE
    assert len(pages) == 20
    assert with_window[-2:].all()
    assert not with_window[:10].any()

    whole = harness.add([*prompt, 1], max_tokens=2)  # goes on from the end
    finish(harness, whole)
    assert whole.cached_tokens == 4 * len(pages)
    half = harness.add([*prompt[:40], 1], max_tokens=2)  # from the middle, whose window pages are gone
    finish(harness, half)
    assert half.cached_tokens == 0
    again = harness.add([*prompt[:40], 2], max_tokens=2)  # and have been computed again: cached pages got them back
    finish(harness, again)
    assert again.cached_tokens == 40


def test_reach_counts_from_the_end_of_the_window() -> None:
    harness = mixed(num_window_pages=20)
    finish(harness, harness.add([0, 1] * 24 + [0], max_tokens=1))
    memory, tokens = memory_of(harness), np.array([0, 1] * 24, dtype=np.int32)
    assert len(memory.match(tokens).pages) == 12
    page = int(memory.cache.match(tokens).pages[9])  # positions 36 … 39
    memory.windows._idle.pop(int(memory.windows.of_page[page]))
    memory.windows._free(memory.windows.of_page[[page]])
    # A query at position 48 sees those from 41 on, and one at 44 those from 37 on, which are gone.
    assert len(memory.match(tokens).pages) == 12
    assert len(memory.match(tokens[:46]).pages) == 9
    assert len(memory.match(tokens[:36]).pages) == 9


def test_a_request_starts_with_room_for_a_token_and_for_the_first_one_of_its_answer() -> None:
    memory = memory_of(mixed(20, page_size=1))
    assert [memory.window_demands(1, most, cached_pages=0)[0].now for most in (2, 3, 50)] == [1, 2, 2]


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("delay", DELAYS)
def test_reserved_window_pages_suffice(cache: str, delay: int) -> None:
    """Three requests may start, the fourth waits although there are pages for it, and none is preempted."""
    harness = mixed(
        3 * LEAST, num_pages=256, prefix_cache=cache, delay=delay, admission_policy="reserve", max_prefill_tokens=16
    )
    requests = [harness.add([seed, 2, seed] * 15, max_tokens=80) for seed in range(4)]
    together = 0
    while harness.scheduler.has_work:
        harness.step()
        together = max(together, len(harness.table.slots))
    assert together == 3
    assert [request.preemptions for request in requests] == [0] * 4
    finish(harness, *requests)


def random_life(seed: int, admission_policy: str) -> list[Request]:
    """Run up to six requests through a random engine."""
    rng = random.Random(seed)
    page_size, window, drafts = rng.choice([1, 2, 4]), rng.randint(1, 20), rng.choice([0, 0, 1, 3, 7])
    least = int(most_window_pages(128, page_size, window, drafts))
    harness = Harness(
        page_size=page_size,
        num_pages=1000,
        max_seq_len=128,
        vocab=2,
        window=window,
        num_window_pages=rng.randint(1, 3) * least + rng.choice([0, 0, 1, 3]),
        drafter=KnowsTheShadow if drafts else None,
        num_draft_tokens=max(drafts, 1),
        admission_policy=admission_policy,
        prefix_cache=rng.choice(CACHES),
        batch_policy=rng.choice(["prefill-first", "mixed", "static"]),
        max_prefill_tokens=rng.choice([1, 3, 7, 16, 64]),
        delay=rng.choice(DELAYS),
    )
    requests = []
    for _ in range(rng.randint(2, 6)):
        prompt = [0, 1] * 35 if rng.random() < 0.4 else rng.choices([0, 1], k=70)
        requests.append(harness.add(prompt[: rng.randint(1, 70)], max_tokens=rng.randint(1, 50)))
        for _ in range(rng.randint(0, 5)):
            harness.step()
    finish(harness, *requests)
    return requests


# Of 400 seeds, those that notice when one of the promises is forgotten.
@pytest.mark.parametrize("seed", [0, 153, 179, 208, 262, 284, 299, 390])
def test_nothing_is_preempted_that_has_reserved(seed: int) -> None:
    """Chunks that end with a page, rows that share window pages, and drafts: all find what they were promised."""
    requests = random_life(seed, "reserve")
    assert [request.preemptions for request in requests] == [0] * len(requests)


@pytest.mark.parametrize("seed", [1047, 1105])
def test_a_prompt_waits_where_no_window_page_is_left_for_its_next_chunk(seed: int) -> None:
    """These met a row whose window pages were full to the last place."""
    random_life(seed, "optimistic")


@pytest.mark.parametrize("batch_policy", ["prefill-first", "mixed"])
@pytest.mark.parametrize("delay", DELAYS)
def test_rows_that_lack_window_pages_are_preempted(batch_policy: str, delay: int) -> None:
    policies = Policies.named(batch_policy=batch_policy)
    policies = Policies(queue=policies.queue, batch=policies.batch, admission=Bold())
    harness = mixed(LEAST + 1, prefix_cache="none", delay=delay, policies=policies)
    requests = [harness.add([seed] * 5, max_tokens=40) for seed in range(3)]
    harness.run()
    assert sum(request.preemptions for request in requests) > 0
    finish(harness, *requests)


@pytest.mark.parametrize("delay", DELAYS)
def test_prompts_do_not_wait_for_one_another_for_ever(delay: int) -> None:
    """Two long prompts hold all window pages between them, and neither has decode rows to wait for."""
    harness = mixed(LEAST, prefix_cache="none", delay=delay, max_prefill_tokens=12, policies=Policies(admission=Bold()))
    first, second = (harness.add([seed, 2] * 30, max_tokens=3) for seed in (0, 1))
    for _ in range(400):
        harness.step()
    assert second.finish_reason is first.finish_reason is FinishReason.LENGTH
    finish(harness, first, second)


@pytest.mark.parametrize("in_flight", [False, True])
def test_aborted_requests_leave_nothing(in_flight: bool) -> None:
    harness = mixed(20, delay=int(in_flight), max_prefill_tokens=16)
    requests = [harness.add([0, 1, seed] * 20, max_tokens=60) for seed in range(3)]
    for steps, request in zip((2, 9, 12), requests, strict=True):
        for _ in range(steps):
            harness.step()
        harness.abort(request)
    harness.run()
    harness.assert_idle_and_clean()
    assert held(harness) == 0


def test_evicted_pages_and_a_flush_give_window_pages_back() -> None:
    harness = mixed(20)
    finish(harness, harness.add([0, 1] * 30, max_tokens=3))
    windows = memory_of(harness).windows
    assert windows.pool.num_free < 20
    harness.memory.flush()
    assert windows.pool.num_free == 20
    harness.scheduler.check()


def test_check_notices_what_went_back_too_early_or_not_at_all() -> None:
    harness = mixed(20, prefix_cache="none")
    request = harness.add([0] * 20, max_tokens=40)
    harness.step()
    harness.step()
    memory, slot = memory_of(harness), request.slot
    memory.check()
    table = memory.page_table.window_rows
    table[slot, 0] = 3
    with pytest.raises(InvariantError, match="still maps"):
        memory.check()
    table[slot, 0] = 20
    table[slot, 4], kept = table[slot, 3], table[slot, 4]
    with pytest.raises(InvariantError, match="not those of its pages"):
        memory.check()
    table[slot, 4] = kept
    memory.windows.holders[table[slot, 4]] += 1
    with pytest.raises(InvariantError, match="holders"):
        memory.check()
    memory.windows.holders[table[slot, 4]] -= 1
    memory.give_back(np.array([slot], dtype=np.int32), np.array([30], dtype=np.int32))
    with pytest.raises(InvariantError, match="still reads"):
        memory.check()
