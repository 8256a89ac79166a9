"""What every page store must fulfil, however much it keeps: what comes back is what was saved; nothing else moves."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from minisgl.kvcache.page_store import PAGE_STORES, PageStore
from minisgl.kvcache.pool import KVCache
from minisgl.registry import resolve
from minisgl.request import Int32Array
from tests.scheduler.harness import Harness

CONTRACTS = {"make_store": (PAGE_STORES, PageStore)}

MakeStore = Callable[[KVCache], PageStore]


@pytest.fixture
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    return resolve("--impl", request.param, PAGE_STORES)


def random_cache(kv_dtype: torch.dtype | None = None) -> KVCache:
    """Three layers, 16 pages of 4 tokens, all different."""
    cache = KVCache(3, 2, 8, 16, 4, torch.float32, torch.device("cpu"), kv_dtype)
    generator = torch.Generator().manual_seed(0)
    for memory in (cache.k, cache.v):
        memory.copy_(torch.randn(memory.shape, generator=generator).to(memory.dtype))
    return cache


def content(cache: KVCache, *pages: int) -> torch.Tensor:
    return cache.read_pages(torch.tensor(pages, dtype=torch.int64)).clone()


def ids(*pages: int) -> Int32Array:
    return np.array(pages, dtype=np.int32)


def names(*numbers: int) -> list[bytes]:
    return [bytes([number]) * 16 for number in numbers]


def harness_over(make_store: MakeStore, num_pages: int, delay: int = 0) -> Harness:
    """A small engine whose evicted pages go to the store."""
    harness = Harness(page_size=4, num_pages=num_pages, max_running=4, delay=delay)
    harness.keep_evicted_pages(make_store)
    return harness


@pytest.mark.parametrize("kv_dtype", [None, torch.float8_e4m3fn, torch.bfloat16])
def test_what_comes_back_is_what_was_saved(make_store: MakeStore, kv_dtype: torch.dtype | None) -> None:
    cache = random_cache(kv_dtype)
    store = make_store(cache)
    saved = content(cache, 3, 5, 1)
    store.save(names(1, 2, 3), ids(3, 5, 1))
    cache.k.zero_()
    cache.v.zero_()
    before = content(cache, *range(17))
    count = store.restore(names(1, 2, 3), ids(9, 3, 11))
    assert 0 <= count <= 3
    assert torch.equal(content(cache, 9, 3, 11)[:, :, :count], saved[:, :, :count])
    others = [page for page in range(17) if page not in (9, 3, 11)[:count]]
    assert torch.equal(content(cache, *others), before[:, :, others])


def test_nothing_comes_back_that_was_not_saved(make_store: MakeStore) -> None:
    cache = random_cache()
    store = make_store(cache)
    store.save(names(1), ids(3))
    before = content(cache, *range(17))
    assert store.restore(names(2, 1), ids(4, 5)) == 0
    assert store.restore([], ids()) == 0
    store.save([], ids())
    assert torch.equal(content(cache, *range(17)), before)


def test_an_engine_short_of_memory_answers_everybody(make_store: MakeStore) -> None:
    """Prompts that begin alike, evictions all the time, and an executor that knows what every position should hold."""
    harness = harness_over(make_store, num_pages=14)
    rng = np.random.default_rng(3)
    starts = [rng.integers(0, 3, 16).tolist() for _ in range(4)]
    added = []
    for number in range(60):
        prompt = starts[number % 4] + rng.integers(0, 3, number % 7).tolist()
        added.append(harness.add(prompt, max_tokens=1 + number % 5))
        harness.step()
    harness.run()
    for request in added:
        harness.assert_output(request)
    harness.assert_idle_and_clean()
