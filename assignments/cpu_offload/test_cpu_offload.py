"""What a store that remembers does beyond the contract."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from minisgl.kvcache.page_store import PAGE_STORES, PageStore
from minisgl.llm import LLM
from minisgl.registry import resolve
from minisgl.sampling_params import SamplingParams
from tests.contracts.test_page_store import content, harness_over, ids, names, random_cache
from tests.model_zoo import random_tokens, tiny_checkpoint

CONTRACTS = {"make_store": (PAGE_STORES, PageStore)}

MakeStore = Callable[..., PageStore]


@pytest.fixture
def make_store(request: pytest.FixtureRequest) -> MakeStore:
    return resolve("--impl", request.param, PAGE_STORES)


class TestStore:
    def test_all_that_was_saved(self, make_store: MakeStore) -> None:
        cache = random_cache()
        store = make_store(cache, 8)
        saved = content(cache, 3, 5, 1)
        store.save(names(1, 2), ids(3, 5))
        store.save(names(3), ids(1))
        cache.k.zero_()
        cache.v.zero_()
        restored = store.restore(names(1, 2, 3), ids(7, 8, 9))
        assert restored == 3, f"three pages were saved, and {restored} come back"
        assert torch.equal(content(cache, 7, 8, 9), saved), "the pages that come back are not those that were saved"

    def test_as_often_as_it_is_wanted(self, make_store: MakeStore) -> None:
        cache = random_cache()
        store = make_store(cache, 8)
        saved = content(cache, 3)
        store.save(names(1), ids(3))
        for page in (4, 5, 6):
            assert store.restore(names(1), ids(page)) == 1, "a page that was restored before does not come back again"
            assert torch.equal(content(cache, page), saved), "the page that comes back is not the one that was saved"

    def test_up_to_the_first_that_is_not_there(self, make_store: MakeStore) -> None:
        cache = random_cache()
        store = make_store(cache, 8)
        store.save(names(1, 3), ids(1, 3))
        before = content(cache, 8, 9)
        restored = store.restore(names(1, 2, 3), ids(7, 8, 9))
        assert restored == 1, f"page 2 is not in the store, so page 1 alone can come back; restore says {restored}"
        assert torch.equal(content(cache, 8, 9), before), "restore wrote to pages after the first that is not there"

    def test_two_stores_have_nothing_in_common(self, make_store: MakeStore) -> None:
        one, other = make_store(random_cache(), 8), make_store(random_cache(), 8)
        one.save(names(1), ids(3))
        assert other.restore(names(1), ids(4)) == 0, "a store has a page that another one saved"


def kept(store: PageStore, *numbers: int) -> list[int]:
    """Which of these a store has. Asking is a use."""
    return [number for number in numbers if store.restore(names(number), ids(15))]


class TestBound:
    def test_the_least_recently_saved_goes_first(self, make_store: MakeStore) -> None:
        store = make_store(random_cache(), 3)
        for number in range(1, 6):
            store.save(names(number), ids(number))
        left = kept(store, 1, 2, 3, 4, 5)
        assert left == [3, 4, 5], f"of pages 1 to 5, room for three keeps the last three; the store has {left}"

    def test_restoring_is_a_use(self, make_store: MakeStore) -> None:
        store = make_store(random_cache(), 3)
        store.save(names(1, 2, 3), ids(1, 2, 3))
        store.restore(names(1), ids(9))
        store.save(names(4), ids(4))
        left = kept(store, 1, 2, 3, 4)
        assert left == [1, 3, 4], f"page 1 was restored last, so page 2 must make room; the store has {left}"

    def test_saving_again_is_a_use_and_takes_no_room(self, make_store: MakeStore) -> None:
        store = make_store(random_cache(), 3)
        store.save(names(1, 2, 3), ids(1, 2, 3))
        store.save(names(1), ids(7))
        left = kept(store, 3, 2, 1)
        assert left == [3, 2, 1], f"saving page 1 a second time takes no room; the store has {left}"
        store.save(names(1), ids(7))
        store.save(names(4, 5), ids(4, 5))
        left = kept(store, 1, 2, 3, 4, 5)
        assert left == [1, 4, 5], f"saving page 1 again is a use, so pages 2 and 3 make room; the store has {left}"

    def test_more_at_once_than_there_is_room_for(self, make_store: MakeStore) -> None:
        cache = random_cache()
        store = make_store(cache, 3)
        saved = {number: content(cache, number) for number in range(1, 9)}
        store.save(names(*saved), ids(*saved))
        found = kept(store, *saved)
        assert len(found) == 3, f"eight pages come at once and there is room for three; the store has {found}"
        for number in found:
            store.restore(names(number), ids(12))
            assert torch.equal(content(cache, 12), saved[number]), (
                f"page {number} comes back with another one's content"
            )


class TestEngine:
    def test_an_evicted_prompt_is_not_computed_again(self, make_store: MakeStore) -> None:
        harness = harness_over(lambda cache: make_store(cache, 64), num_pages=16)
        rng = np.random.default_rng(0)
        conversation = rng.integers(0, 3, 42).tolist()
        harness.add(conversation, max_tokens=2)
        harness.run()
        for _ in range(4):  # others come, and their prompts fill the whole pool
            harness.add(rng.integers(0, 3, 50).tolist(), max_tokens=2)
            harness.run()
        cached = len(harness.memory.cache.match(np.array(conversation, dtype=np.int32)).pages)
        assert cached == 0, f"the pool is too small for this test: {cached} pages of the conversation are still in it"
        fed = harness.executor.fed_tokens
        again = harness.add(conversation, max_tokens=2)
        harness.run()
        harness.assert_output(again)
        assert again.cached_tokens == 40, f"40 of 42 tokens are in the store, and {again.cached_tokens} were found"
        fed = harness.executor.fed_tokens - fed
        assert fed == 2 + 1, f"the model was fed {fed} tokens, where two of the prompt and one of the answer are enough"
        cached = len(harness.memory.cache.match(np.array(conversation, dtype=np.int32)).pages)
        assert cached == 10, f"restored pages belong in the prefix cache again: 10 of them, and it has {cached}"

    def test_a_model_gives_the_same_answers(
        self, make_store: MakeStore, request: pytest.FixtureRequest, tmp_path: Path
    ) -> None:
        path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
        prompts = [tokens.tolist() for tokens in random_tokens(21, 17, 30, 25)] * 3
        params = SamplingParams(temperature=0.0, max_tokens=6)
        options: dict[str, Any] = {"device": "cpu", "page_size": 4, "num_pages": 12, "max_running_requests": 1}
        spec = str(request.node.callspec.params["make_store"])
        with_store, without = (LLM(path, page_store=store, **options) for store in (spec, "none"))
        expected = [output.token_ids for output in without.generate(prompts, params)]
        answers = [output.token_ids for output in with_store.generate(prompts, params)]
        assert answers == expected, "with the store, the model answers otherwise than without"


class Operations(TorchDispatchMode):
    """Counts what PyTorch is told to compute."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def operations(store: PageStore, count: int) -> int:
    """Of saving and restoring that many pages."""
    numbers = range(count)
    with Operations() as seen:
        store.save(names(*numbers), ids(*numbers))
        restored = store.restore(names(*numbers), ids(*numbers))
        assert restored == count, f"{count} pages were saved, and {restored} come back"
    return seen.counts.total()


class TestOperations:
    def test_as_many_for_many_pages_as_for_one(self, make_store: MakeStore) -> None:
        one, many = (operations(make_store(random_cache(), 64), count) for count in (1, 16))
        assert many <= one + 4, f"{many} operations for 16 pages, {one} for one: they are copied one by one"
