"""Pages that go to a store and come back: under their right names, and never with content that cannot be trusted."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from minisgl.kvcache.page_store import PageOffloader
from minisgl.kvcache.pool import KVCache
from minisgl.request import FinishReason, Int32Array
from tests.contracts.test_page_store import harness_over
from tests.fake_executor import Fault
from tests.scheduler.harness import DELAYS


class Everything:
    """Keeps all that it is given."""

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.content: dict[bytes, torch.Tensor] = {}
        self.restored = 0

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        for name, page in zip(names, pages.tolist(), strict=True):
            self.content[name] = self.kv_cache.read_pages(torch.tensor([page]))

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        assert len(names) == len(pages) > 0
        count = 0
        while count < len(names) and names[count] in self.content:
            self.kv_cache.write_pages(torch.tensor([int(pages[count])]), self.content[names[count]])
            count += 1
        self.restored += count
        return count


def tokens(*labels: int) -> Int32Array:
    """Two a label."""
    return np.repeat(np.array(labels, dtype=np.int32), 2)


class Names(Everything):
    """Notes what it is asked for, and has nothing."""

    def __init__(self) -> None:
        self.asked: list[list[bytes]] = []

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        self.asked.append([*names])

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        self.asked.append([*names])
        return 0


def test_a_name_is_that_of_the_whole_prefix() -> None:
    store = Names()
    offload = PageOffloader(store, 2)
    offload.note(tokens(1, 2, 3), np.array([10, 11, 12]))
    offload.note(tokens(1, 2, 4), np.array([10, 11, 13]))
    offload.note(tokens(2, 3), np.array([14, 15]))
    offload.save(np.array([12, 13, 15, 11, 10, 14]))
    (saved,) = store.asked
    assert len(set(saved)) == 6
    assert all(len(name) == 16 for name in saved)
    offload.restore(tokens(1, 2, 3), 1, np.array([20, 21, 22]))
    assert store.asked[1] == [saved[3], saved[0]]


def test_a_page_that_is_not_full_is_not_asked_for() -> None:
    store = Names()
    assert PageOffloader(store, 2).restore(tokens(1, 2)[:3], 1, np.array([5])) == 0
    assert store.asked == []


def test_forgotten_pages_are_not_saved() -> None:
    store = Names()
    offload = PageOffloader(store, 2)
    offload.note(tokens(1), np.array([10]))
    offload.forget(np.array([10]))
    offload.note(tokens(2), np.array([10]))
    offload.save(np.array([10]))
    assert len(store.asked) == 1


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("at_launch", [True, False])
def test_what_a_failed_step_wrote_never_comes_back(delay: int, at_launch: bool) -> None:
    """The executor fails every tenth step and leaves garbage where its KV belongs."""
    stores: list[Everything] = []

    def make_store(kv_cache: KVCache) -> Everything:
        stores.append(Everything(kv_cache))
        return stores[0]

    harness = harness_over(make_store, num_pages=20, delay=delay)
    rng = np.random.default_rng(7)
    starts = [rng.integers(0, 3, 24).tolist() for _ in range(5)]
    added = []
    for number in range(150):
        prompt = starts[int(rng.integers(5))] + rng.integers(0, 3, number % 7).tolist()
        added.append(harness.add(prompt, max_tokens=1 + number % 5))
        if number % 10 == 9:
            harness.faulty.fault = Fault(at_launch, RuntimeError("broken"))
        harness.step()
    harness.run()
    for request in added:
        harness.assert_output(request)
        assert request.finish_reason is FinishReason.LENGTH or request.uid in harness.faulty.doomed
    assert stores[0].restored > 50
    harness.assert_idle_and_clean()
