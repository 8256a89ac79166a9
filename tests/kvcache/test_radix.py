"""The shape of the tree. What any prefix cache guarantees is tested in ``tests/contracts``."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from unittest.mock import Mock

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.request import Int32Array


def array(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def shape(node: Node) -> dict[tuple[int, ...], object]:
    """The subtree as nested dictionaries: edge tokens → what is below."""
    return {tuple(child.tokens.tolist()): shape(child) for child in node.children.values()}


@pytest.fixture
def cache() -> RadixCache:
    return RadixCache(page_size=1)


def test_an_insert_is_one_edge(cache: RadixCache) -> None:
    cache.insert(array(1, 2, 3), array(10, 11, 12))
    assert shape(cache.root) == {(1, 2, 3): {}}


def test_an_extension_is_a_child(cache: RadixCache) -> None:
    cache.insert(array(1, 2), array(10, 11))
    cache.insert(array(1, 2, 3, 4), array(20, 21, 22, 23))
    assert shape(cache.root) == {(1, 2): {(3, 4): {}}}


def test_of_an_edge_that_agrees_in_part_the_upper_end_is_used(
    cache: RadixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    upper = Node(9, array(1, 2), array(10, 11), cache.root, last_access=1, uses=1)
    asked: list[tuple[Node, int]] = []
    monkeypatch.setattr(cache, "_split", lambda node, count: asked.append((node, count)) or upper)
    node, pages = cache._walk(array(1, 2, 9))
    assert asked == [(below, 2)]
    assert node is upper, "the prefix ends in the new node"
    assert pages.tolist() == [10, 11]
    assert (upper.last_access, upper.uses) == (2, 2)
    assert (below.last_access, below.uses) == (1, 1), "nobody has asked for what comes behind"


def test_page_numbers_are_int32_however_many_there_are(cache: RadixCache) -> None:
    cache.insert(array(1, 2), array(10, 11))
    for tokens in (array(), array(7), array(1, 2)):
        assert cache._walk(tokens)[1].dtype == np.int32


def test_an_edge_is_split_where_a_branch_leaves_it(cache: RadixCache) -> None:
    cache.insert(array(1, 2, 3), array(10, 11, 12))
    cache.insert(array(1, 2, 4), array(20, 21, 22))
    assert shape(cache.root) == {(1, 2): {(3,): {}, (4,): {}}}
    assert [node.pages.tolist() for node in cache.nodes()] in ([[10, 11], [12], [22]], [[10, 11], [22], [12]])


def test_a_match_ends_in_a_node_of_its_own(cache: RadixCache) -> None:
    cache.insert(array(1, 2, 3), array(10, 11, 12))
    match = cache.match(array(1, 2, 9))
    assert shape(cache.root) == {(1, 2): {(3,): {}}}
    assert match.handle.tokens.tolist() == [1, 2]


def test_edges_are_split_between_pages_only() -> None:
    cache = RadixCache(page_size=4)
    cache.insert(array(1, 2, 3, 4, 5, 6, 7, 8), array(10, 11))
    cache.match(array(1, 2, 3, 4, 5, 6, 7, 9))
    assert shape(cache.root) == {(1, 2, 3, 4): {(5, 6, 7, 8): {}}}
    cache.insert(array(1, 2, 3, 5), array(20))
    assert shape(cache.root) == {(1, 2, 3, 4): {(5, 6, 7, 8): {}}, (1, 2, 3, 5): {}}


def test_a_split_keeps_the_identity_of_the_lower_half_and_the_locks_of_both(cache: RadixCache) -> None:
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    cache.lock(below)
    upper = cache.match(array(1, 2)).handle
    assert below.parent is upper
    assert below.tokens.tolist() == [3]
    assert (upper.lock_count, below.lock_count) == (1, 1)
    cache.lock(upper)
    assert (upper.lock_count, below.lock_count) == (2, 1)
    cache.unlock(below)
    assert (upper.lock_count, below.lock_count, cache.num_evictable) == (1, 0, 1)
    cache.check()


def test_a_split_alone_leaves_a_sound_tree(cache: RadixCache) -> None:
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    upper = cache._split(below, 2)
    assert (upper.last_access, below.last_access) == (1, 1)
    cache.check()


def test_a_split_is_no_use_and_takes_nothing_from_the_lower_half(cache: RadixCache) -> None:
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    last = cache.insert(array(1, 2, 3, 4), array(10, 11, 12, 13)).handle
    cache.insert(array(9), array(90))  # time goes on
    upper = cache._split(below, 2)
    assert shape(cache.root) == {(1, 2): {(3,): {(4,): {}}}, (9,): {}}, "the children hang on the lower half"
    assert last.parent is below
    assert (upper.last_access, upper.uses, upper.priority) == (2, 2, below.priority), "as the whole had them"
    assert upper.uid not in {node.uid for node in cache.nodes() if node is not upper} | {cache.root.uid}
    assert (cache.num_pages, cache.num_evictable) == (5, 5)
    cache.check()


def test_both_halves_of_a_split_have_the_locks_of_the_whole(cache: RadixCache) -> None:
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    below.lock_count = 2
    upper = cache._split(below, 2)
    assert (upper.lock_count, below.lock_count) == (2, 2)


def test_a_leaf_that_loses_its_last_lock_is_queued_again(cache: RadixCache) -> None:
    handle = cache.insert(array(1, 2), array(10, 11)).handle
    cache.lock(handle)
    cache.lock(handle)
    cache._heap.clear()  # as if its entry had come up meanwhile and been dropped
    handle.queued = False
    cache.unlock(handle)
    assert not handle.queued, "one lock remains"
    cache.unlock(handle)
    assert handle.queued, "without an entry in the heap, eviction would never find it"
    cache.check()


def test_a_lock_counts_on_every_node_up_to_the_root(cache: RadixCache) -> None:
    upper = cache.insert(array(1, 2), array(10, 11)).handle
    below = cache.insert(array(1, 2, 3), array(10, 11, 12)).handle
    cache.lock(below)
    cache.lock(upper)
    assert (upper.lock_count, below.lock_count, cache.num_evictable) == (2, 1, 0)
    cache.unlock(below)
    assert (upper.lock_count, below.lock_count, cache.num_evictable) == (1, 0, 1)
    cache.unlock(upper)
    assert (upper.lock_count, below.lock_count, cache.num_evictable) == (0, 0, 3)
    cache.check()


def test_a_locked_leaf_is_passed_over(cache: RadixCache) -> None:
    old = cache.insert(array(1), array(10)).handle
    cache.insert(array(2), array(20))
    cache.lock(old)  # its entry stays in the heap, with the priority that it still has
    assert cache.evict(2).tolist() == [20]
    cache.unlock(old)
    assert cache.evict(2).tolist() == [10], "an unlocked leaf is found again"


def test_a_leaf_that_has_got_a_child_is_passed_over(cache: RadixCache) -> None:
    old = cache.insert(array(1), array(10)).handle
    cache.insert(array(2), array(20))
    cache._add_leaf(old, array(3), array(30))  # no use of the old one, whose entry in the heap has its priority
    assert cache.evict(1).tolist() == [20]
    assert cache.evict(2).tolist() == [30, 10], "the end of a prompt goes before its beginning"
    cache.check()


def test_eviction_cascades_from_leaves_to_bared_parents(cache: RadixCache) -> None:
    cache.insert(array(1, 2), array(10, 11))
    cache.insert(array(1, 3), array(20, 21))
    cache.insert(array(5, 6), array(30, 31))
    cache.match(array(1))  # later than the unrelated branch, although the leaves below are older
    assert cache.evict(2).tolist() == [11, 21]
    assert cache.evict(2).tolist() == [30, 31]
    assert cache.evict(1).tolist() == [10]
    cache.check()


def test_the_last_leaf_loses_only_its_tail(cache: RadixCache) -> None:
    cache.insert(array(1, 2, 3, 4), array(10, 11, 12, 13))
    cache.insert(array(5, 6), array(20, 21))
    assert cache.evict(3).tolist() == [11, 12, 13]
    assert shape(cache.root) == {(1,): {}, (5, 6): {}}
    assert cache.evict(2).tolist() == [10, 21]


def test_the_heap_has_at_most_one_entry_a_node(cache: RadixCache) -> None:
    for first in range(20):
        cache.insert(array(first, 1), array(2 * first, 2 * first + 1))
    for _ in range(50):
        handle = cache.match(array(7, 1)).handle
        cache.lock(handle)
        cache.unlock(handle)
        cache.evict(0)
    assert len(cache._heap) == 20


def test_eviction_looks_at_few_nodes(cache: RadixCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """One page out of thousands of leaves costs one entry of the heap, and one more for each leaf used since."""
    for first in range(2000):
        cache.insert(array(first), array(first))
    for first in range(3):
        cache.match(array(first))
    pop = Mock(wraps=heapq.heappop)
    monkeypatch.setattr(heapq, "heappop", pop)
    monkeypatch.setattr(RadixCache, "nodes", None)  # no walk over the tree
    assert cache.evict(1).tolist() == [3]
    assert pop.call_count == 4


def test_lengths_must_fit(cache: RadixCache) -> None:
    with pytest.raises(InvariantError):
        cache.insert(array(1, 2, 3), array(10, 11))


@pytest.mark.parametrize("pages", [(20, 21), (20, 21, 22, 23)])
def test_what_does_not_fit_changes_nothing(cache: RadixCache, pages: tuple[int, ...]) -> None:
    cache.insert(array(1, 2, 4), array(10, 11, 12))
    with pytest.raises(InvariantError):
        cache.insert(array(1, 2, 4), array(*pages))
    assert cache._clock == 1, "not even the time"
    assert [node.uses for node in cache.nodes()] == [1]


def test_lock_of_an_evicted_prefix(cache: RadixCache) -> None:
    handle = cache.insert(array(1, 2), array(10, 11)).handle
    cache.evict(2)
    with pytest.raises(InvariantError, match="has been evicted"):
        cache.lock(handle)


def test_unlock_without_lock(cache: RadixCache) -> None:
    handle = cache.insert(array(1, 2), array(10, 11)).handle
    with pytest.raises(InvariantError):
        cache.unlock(handle)


def leaf_of(cache: RadixCache) -> Node:
    return next(node for node in cache.nodes() if not node.children)


def forget_a_lock(cache: RadixCache) -> None:
    cache.lock(leaf_of(cache))
    parent = leaf_of(cache).parent
    assert parent is not None
    parent.lock_count = 0


def shorten_an_edge(cache: RadixCache) -> None:
    leaf_of(cache).tokens = leaf_of(cache).tokens[:-1]


def change_a_token(cache: RadixCache) -> None:
    leaf_of(cache).tokens[0] += 1


def miscount_pages(cache: RadixCache) -> None:
    cache.num_pages += 1


def miscount_evictable(cache: RadixCache) -> None:
    cache.num_evictable -= 1


def repeat_a_page(cache: RadixCache) -> None:
    leaf_of(cache).pages[0] = 10


def adopt(cache: RadixCache) -> None:
    leaf_of(cache).parent = cache.root


def age_a_parent(cache: RadixCache) -> None:
    parent = leaf_of(cache).parent
    assert parent is not None
    parent.last_access = 0


def lose_a_heap_entry(cache: RadixCache) -> None:
    cache._heap.pop()


def unqueue_a_leaf(cache: RadixCache) -> None:
    leaf_of(cache).queued = False


def postpone_a_heap_entry(cache: RadixCache) -> None:
    cache._heap[0] = (99, *cache._heap[0][1:])


@pytest.mark.parametrize(
    "corrupt",
    [
        forget_a_lock,
        shorten_an_edge,
        change_a_token,
        miscount_pages,
        miscount_evictable,
        repeat_a_page,
        adopt,
        age_a_parent,
        lose_a_heap_entry,
        unqueue_a_leaf,
        postpone_a_heap_entry,
    ],
)
def test_check_notices(cache: RadixCache, corrupt: Callable[[RadixCache], None]) -> None:
    cache.insert(array(1, 2, 3), array(10, 11, 12))
    cache.insert(array(1, 2, 4), array(20, 21, 22))
    cache.check()
    corrupt(cache)
    with pytest.raises(InvariantError):
        cache.check()
