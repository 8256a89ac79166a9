"""Hashes, collisions and the queue. What any prefix cache guarantees is tested in ``tests/contracts``."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minisgl.errors import InvariantError
from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.request import Int32Array


def array(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def cache() -> BlockHashCache:
    return BlockHashCache(page_size=2)


def test_a_key_depends_on_all_tokens_before(cache: BlockHashCache) -> None:
    one = cache.insert(array(1, 2, 7, 8), array(10, 11)).handle
    two = cache.insert(array(1, 3, 7, 8), array(20, 21)).handle
    assert one[1].tokens == two[1].tokens
    assert one[1].key != two[1].key
    assert one[1].key == cache.hash_block(cache.hash_block(0, array(1, 2).tobytes()), array(7, 8).tobytes())


class OneKey(BlockHashCache):
    """Every block has the same key."""

    @staticmethod
    def hash_block(parent_key: int, tokens: bytes) -> int:
        return 1


class OwnTokensOnly(BlockHashCache):
    """The key forgets the prefix: blocks of equal tokens collide wherever they stand."""

    @staticmethod
    def hash_block(parent_key: int, tokens: bytes) -> int:
        return BlockHashCache.hash_block(0, tokens)


def test_a_collision_of_tokens_is_a_miss() -> None:
    cache = OneKey(page_size=2)
    cache.insert(array(1, 2), array(10))
    assert cache.match(array(1, 3)).pages.tolist() == []
    assert cache.match(array(1, 2)).pages.tolist() == [10]


def test_a_collision_of_prefixes_is_a_miss() -> None:
    cache = OwnTokensOnly(page_size=2)
    cache.insert(array(1, 2, 7, 8), array(10, 11))
    cache.insert(array(3, 4), array(20))
    assert cache.match(array(3, 4, 7, 8)).pages.tolist() == [20]
    assert cache.match(array(7, 8)).pages.tolist() == []


def test_what_collides_is_not_kept_and_nothing_after_it() -> None:
    cache = OwnTokensOnly(page_size=2)
    cache.insert(array(1, 2, 7, 8), array(10, 11))
    assert cache.insert(array(3, 4, 7, 8, 5, 6), array(20, 21, 22)).pages.tolist() == [20]
    assert cache.num_pages == 3
    cache.check()


@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=12), st.integers(1, 3))
@settings(max_examples=100, derandomize=True, database=None)
def test_no_collision_ever_yields_a_page_of_other_tokens(prompts: list[list[int]], num_keys: int) -> None:
    class FewKeys(BlockHashCache):
        @staticmethod
        def hash_block(parent_key: int, tokens: bytes) -> int:
            return BlockHashCache.hash_block(parent_key, tokens) % num_keys

    cache = FewKeys(page_size=1)
    content: dict[int, list[int]] = {}
    for number, prompt in enumerate(prompts):
        offered = np.arange(len(prompt), dtype=np.int32) + 100 * number
        for end, page in enumerate(offered.tolist(), start=1):
            content[page] = prompt[:end]
        for pages in (cache.insert(array(*prompt), offered).pages, cache.match(array(*prompt)).pages):
            assert [content[page] for page in pages.tolist()] == [prompt[: end + 1] for end in range(len(pages))]
        cache.evict(number % 2)
        cache.check()


def test_unreferenced_blocks_keep_their_content_until_evicted(cache: BlockHashCache) -> None:
    handle = cache.insert(array(1, 2, 3, 4), array(10, 11)).handle
    cache.lock(handle)
    cache.unlock(handle)
    assert cache.match(array(1, 2, 3, 4)).pages.tolist() == [10, 11]
    assert cache.evict(1).tolist() == [11]
    assert cache.match(array(1, 2, 3, 4)).pages.tolist() == [10]


def test_a_released_prefix_waits_at_the_end_of_the_queue(cache: BlockHashCache) -> None:
    running = cache.insert(array(1, 2, 3, 4), array(10, 11)).handle
    cache.lock(running)
    cache.insert(array(5, 6), array(20))
    cache.unlock(running)
    assert cache.evict(3).tolist() == [20, 11, 10]


def test_references_are_counted_a_block(cache: BlockHashCache) -> None:
    longer = cache.insert(array(1, 2, 3, 4), array(10, 11)).handle
    shorter = cache.match(array(1, 2)).handle
    for handle in (longer, shorter, shorter):
        cache.lock(handle)
    assert [block.ref_count for block in longer] == [3, 1]
    cache.unlock(longer)
    assert [block.ref_count for block in longer] == [2, 0]
    assert cache.num_evictable == 1


def waiting(cache: BlockHashCache) -> list[int]:
    """Pages in the order in which they may be evicted."""
    return [block.page for block in cache._unreferenced]


def test_an_insert_is_a_use_of_all_its_blocks(cache: BlockHashCache) -> None:
    cache.insert(array(1, 2), array(10))
    cache.insert(array(5, 6), array(20))
    inserted = cache.insert(array(1, 2, 3, 4), array(30, 31))
    assert inserted.pages.tolist() == [10, 31], "what is known keeps its page"
    assert isinstance(inserted.handle, tuple)
    assert [block.page for block in inserted.handle] == [10, 31]
    assert waiting(cache) == [20, 31, 10], "the known block was used, too, and the last one of a text waits first"
    cache.check()


@pytest.mark.parametrize("pages", [(20,), (20, 21, 22)])
def test_what_does_not_fit_changes_nothing(cache: BlockHashCache, pages: tuple[int, ...]) -> None:
    cache.insert(array(1, 2), array(10))
    with pytest.raises(InvariantError):
        cache.insert(array(1, 2, 3, 4), array(*pages))
    assert cache.held_pages().tolist() == [10]


def test_blocks_join_the_end_of_the_queue_the_last_one_first(cache: BlockHashCache) -> None:
    handle = cache.insert(array(1, 2, 3, 4), array(10, 11)).handle
    cache.insert(array(5, 6), array(20))
    cache.lock(handle)
    assert waiting(cache) == [20], "what a request reads doesn't wait"
    cache.unlock(handle)
    assert waiting(cache) == [20, 11, 10]


def test_a_block_that_is_neither_used_nor_queued_cannot_be_locked(cache: BlockHashCache) -> None:
    handle = cache.insert(array(1, 2), array(10)).handle
    cache._unreferenced.clear()  # as if it had been evicted
    with pytest.raises(InvariantError):
        cache.lock(handle)


def test_lengths_must_fit(cache: BlockHashCache) -> None:
    with pytest.raises(InvariantError):
        cache.insert(array(1, 2, 3), array(10))


def test_lock_of_an_evicted_prefix(cache: BlockHashCache) -> None:
    handle = cache.insert(array(1, 2), array(10)).handle
    cache.evict(1)
    with pytest.raises(InvariantError):
        cache.lock(handle)


def test_unlock_without_lock(cache: BlockHashCache) -> None:
    handle = cache.insert(array(1, 2), array(10)).handle
    with pytest.raises(InvariantError):
        cache.unlock(handle)


def lose_a_parent(cache: BlockHashCache) -> None:
    first = cache.match(array(1, 2)).handle[0]
    del cache._blocks[first.key], cache._unreferenced[first]


def change_tokens(cache: BlockHashCache) -> None:
    cache.match(array(1, 2)).handle[0].tokens = array(1, 3).tobytes()


def reference_in_passing(cache: BlockHashCache) -> None:
    cache.match(array(1, 2)).handle[0].ref_count += 1


def reference_the_child_alone(cache: BlockHashCache) -> None:
    cache.lock(cache.match(array(1, 2, 3, 4)).handle[1:])


def queue_the_parent_first(cache: BlockHashCache) -> None:
    cache._unreferenced.move_to_end(cache.match(array(1, 2, 3, 4)).handle[1])


def queue_what_is_gone(cache: BlockHashCache) -> None:
    del cache._blocks[cache.match(array(1, 2, 3, 4)).handle[1].key]


def repeat_a_page(cache: BlockHashCache) -> None:
    cache.match(array(1, 2)).handle[0].page = 11


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_parent,
        change_tokens,
        reference_in_passing,
        reference_the_child_alone,
        queue_the_parent_first,
        queue_what_is_gone,
        repeat_a_page,
    ],
)
def test_check_notices(cache: BlockHashCache, corrupt: Callable[[BlockHashCache], None]) -> None:
    cache.insert(array(1, 2, 3, 4), array(10, 11))
    cache.check()
    corrupt(cache)
    with pytest.raises(InvariantError):
        cache.check()
