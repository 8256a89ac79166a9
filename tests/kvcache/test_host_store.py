"""Pages in host memory: which are kept, and that every copy arrives where it should, with the bytes that it had."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import xxhash

from minisgl.errors import ConfigError
from minisgl.kvcache.host_store import HostPages, HostStore, QueuedCopies, _runs, check_host_memory, slots_that_fit
from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array
from tests.contracts.test_page_store import ids, names
from tests.fake_executor import Fault
from tests.scheduler.harness import Harness

NUM_PAGES = 24


def kv_cache(dtype: torch.dtype = torch.float32, head_dim: int = 8, device: str = "cpu") -> KVCache:
    """Three layers of pages with 2 tokens, all different."""
    cache = KVCache(3, 1, head_dim, NUM_PAGES, 2, dtype, torch.device(device))
    generator = torch.Generator().manual_seed(0)
    for memory in (cache.k, cache.v):
        memory.copy_(torch.randn(memory.shape, generator=generator).to(dtype))
    return cache


def checksum(cache: KVCache, page: int) -> str:
    content = cache.read_pages(torch.tensor([page], device=cache.k.device))
    return xxhash.xxh3_128_hexdigest(content.cpu().contiguous().view(torch.uint8).numpy().tobytes())


class Directly:
    """Copies are made at once."""

    def __init__(self, cache: KVCache, slots: int, staging: int) -> None:
        self.pages = HostPages(cache, slots, staging)
        self.save, self.load = self.pages.save, self.pages.load

    def settle(self) -> None:
        pass


class Queued(QueuedCopies):
    """Copies are made together, as by a rank with the next step."""

    def __init__(self, cache: KVCache, slots: int, staging: int) -> None:
        super().__init__(slots)
        self.pages = HostPages(cache, slots, staging)

    def settle(self) -> None:
        self.pages.run(self.take())


def copy_at_random(copier: Directly | Queued, cache: KVCache, slots: int) -> None:
    """Save, overwrite and load pages, several calls between two steps, and compare checksums."""
    rng = np.random.default_rng(5)
    kept: dict[int, str] = {}
    for _ in range(40):
        expected: dict[int, str] = {}
        overwritten: set[int] = set()
        for _ in range(int(rng.integers(1, 4))):
            count = int(rng.integers(1, slots + 1))
            pages = rng.permutation(NUM_PAGES)[:count].astype(np.int32)
            places = rng.permutation(slots)[:count].astype(np.int32)
            if rng.random() < 0.5 and not overwritten & set(pages.tolist()):
                copier.save(pages, places)
                kept |= {int(s): checksum(cache, int(p)) for s, p in zip(places, pages, strict=True)}
            elif set(places.tolist()) <= set(kept):
                copier.load(places, pages)
                expected |= {int(p): kept[int(s)] for s, p in zip(places, pages, strict=True)}
                overwritten |= set(pages.tolist())
        copier.settle()
        for page, wanted in expected.items():
            assert checksum(cache, page) == wanted
        for page in rng.permutation(NUM_PAGES)[:3].tolist():  # a step writes
            cache.k[:, page] = float(rng.integers(0, 100))


@pytest.mark.parametrize("make", [Directly, Queued])
@pytest.mark.parametrize("staging", [1, 4, 64])
def test_every_copy_arrives_with_its_bytes(make: Callable[..., Directly | Queued], staging: int) -> None:
    cache = kv_cache()
    copy_at_random(make(cache, 9, staging), cache, 9)


@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.bfloat16, 8), (torch.float8_e4m3fn, 3)])
def test_every_width_of_numbers(dtype: torch.dtype, head_dim: int) -> None:
    cache = kv_cache(dtype, head_dim)
    before = [checksum(cache, page) for page in range(NUM_PAGES + 1)]
    copies = HostPages(cache, 4)
    copies.save(ids(3, 9), ids(2, 0))
    copies.load(ids(0, 2), ids(5, 6))
    after = [checksum(cache, page) for page in range(NUM_PAGES + 1)]
    assert (after[5], after[6]) == (before[9], before[3])
    assert after[:5] + after[7:] == before[:5] + before[7:], "another page was written"


@pytest.mark.gpu
@pytest.mark.parametrize("make", [Directly, Queued])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_every_copy_arrives_on_cuda(make: Callable[..., Directly | Queued], dtype: torch.dtype) -> None:
    cache = kv_cache(dtype, device="cuda")
    copier = make(cache, 9, 4)
    assert all(half.host.is_pinned() for half in copier.pages._halves)
    copy_at_random(copier, cache, 9)
    copier.pages.close()
    copier.pages.close()


@pytest.mark.gpu
def test_copies_do_not_make_the_host_wait() -> None:
    """The device is kept busy for long; a thousand pages are saved and loaded in the meantime."""
    cache = KVCache(8, 2, 128, 1024, 16, torch.bfloat16, torch.device("cuda"))
    copies = HostPages(cache, 1024)
    everything = np.arange(1024, dtype=np.int32)
    for cycles in (200_000_000, 4_000_000_000):  # about two seconds; the first time, PyTorch pins small buffers
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        copies.save(everything, everything)
        copies.load(everything, everything)
    done = torch.cuda.Event()
    done.record()
    assert not done.query(), "the copies, or the host, have waited for the device"
    torch.cuda.synchronize()


class Notes:
    """A `PageCopier` that notes the slots that it is given."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.calls: list[tuple[str, list[int], list[int]]] = []

    def save(self, pages: Int32Array, slots: Int32Array) -> None:
        self.calls.append(("save", pages.tolist(), slots.tolist()))

    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        self.calls.append(("load", pages.tolist(), slots.tolist()))


def has(store: HostStore, *numbers: int) -> list[int]:
    return [number for number in numbers if bytes([number]) * 16 in store._slots]


def test_the_least_recently_used_makes_room() -> None:
    store = HostStore(Notes(3))
    store.save(names(1, 2, 3), ids(1, 2, 3))
    store.restore(names(1), ids(9))
    store.save(names(2), ids(2))
    store.save(names(4), ids(4))
    assert has(store, 1, 2, 3, 4) == [1, 2, 4]
    assert len(store) == 3


def test_the_beginning_of_a_prefix_outlives_its_end() -> None:
    """Without its beginning, the end is of no use. Caches evict the end first."""
    store = HostStore(Notes(3))
    store.save(names(5, 4, 3, 2, 1), ids(5, 4, 3, 2, 1))
    assert has(store, 1, 2, 3, 4, 5) == [1, 2, 3]
    store.restore(names(1, 2, 3), ids(1, 2, 3))
    store.save(names(9), ids(9))
    assert has(store, 1, 2, 3, 9) == [1, 2, 9]


def test_many_pages_are_one_run() -> None:
    """Saved from the end to the beginning, loaded from the beginning to the end: neighbours both times."""
    notes = Notes(8)
    store = HostStore(notes)
    store.save(names(4, 3, 2, 1), ids(40, 30, 20, 10))
    store.restore(names(1, 2, 3, 4), ids(11, 21, 31, 41))
    assert notes.calls == [("save", [40, 30, 20, 10], [0, 1, 2, 3]), ("load", [41, 31, 21, 11], [0, 1, 2, 3])]
    assert list(_runs(ids(0, 1, 2, 3))) == [(slice(0, 4), slice(0, 4))]
    assert list(_runs(ids(5, 2, 3))) == [(slice(0, 1), slice(5, 6)), (slice(1, 3), slice(2, 4))]


def test_a_page_of_a_step_that_fails_later_never_comes_back() -> None:
    """Its request is aborted while the step runs, and the next step evicts the page before anybody knows."""
    harness = Harness(page_size=4, num_pages=8, max_running=2, delay=1, store_slots=32, vocab=3)
    prompt = [1, 2, 0, 1] * 5
    first = harness.add(prompt, max_tokens=4)
    harness.faulty.fault = Fault(False, RuntimeError("broken"))
    harness.step()
    harness.abort(first)
    harness.add([2] * 29, max_tokens=1)
    harness.step()
    assert harness.memory.offload is not None
    assert harness.memory.offload.evicted > 0
    harness.run()
    for _ in range(2):
        again = harness.add(prompt, max_tokens=4)
        harness.run()
        harness.assert_output(again)
        harness.add([2] * 29, max_tokens=1)
        harness.run()
    assert again.cached_tokens == 16, "what was computed anew is kept, and comes back"


def test_sizes_that_cannot_work_are_named() -> None:
    assert slots_that_fit(1.0, 2**20, 2) == 512
    with pytest.raises(ConfigError, match="page_store_gib: 1e-06 GiB hold no page of 8192 bytes"):
        slots_that_fit(1e-6, 4096, 2)
    with pytest.raises(ConfigError, match=r"page_store_gib: 90000 GiB do not fit into the .* GiB of free"):
        check_host_memory(9e4)
