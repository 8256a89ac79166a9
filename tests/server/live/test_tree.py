from __future__ import annotations

import numpy as np

from minisgl.core.request import Int32Array
from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.prefix import NoPrefixCache, PrefixCache
from minisgl.kvcache.radix import RadixCache
from minisgl.server.live.state import HEAD, MOST_NODE_PAGES, MOST_NODES, LiveNode
from minisgl.server.live.tree import MOST_VISITED, nodes_of


def tokens(*values: int) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def pages(first: int, count: int) -> Int32Array:
    return np.arange(first, first + count, dtype=np.int32)


def by_head(cache: PrefixCache) -> dict[tuple[int, ...], LiveNode]:
    return {tuple(node.head): node for node in nodes_of(cache)[0]}


def test_a_split_edge_is_a_parent_and_its_children() -> None:
    cache = RadixCache(page_size=2)
    cache.insert(tokens(1, 2, 3, 4), pages(0, 2))
    cache.lock(cache.insert(tokens(1, 2, 5, 6), pages(0, 1).repeat(2) + pages(0, 2) * 9).handle)
    nodes = by_head(cache)
    assert set(nodes) == {(1, 2), (3, 4), (5, 6)}
    assert nodes[3, 4].parent == nodes[5, 6].parent == nodes[1, 2].uid
    assert nodes[1, 2].parent == 0
    assert [nodes[head].pages for head in ((1, 2), (3, 4), (5, 6))] == [[0], [1], [9]]
    assert [nodes[head].locks for head in ((1, 2), (3, 4), (5, 6))] == [1, 0, 1]
    assert nodes[5, 6].last_used > nodes[3, 4].last_used


def test_of_a_large_tree_the_latest_nodes_are_shown_and_none_without_its_parent() -> None:
    cache = RadixCache(page_size=1)
    cache.insert(tokens(7), pages(0, 1))
    for branch in range(3 * MOST_NODES):
        cache.insert(tokens(7, 1000 + branch), np.asarray([0, 1 + branch], dtype=np.int32))
    nodes, count = nodes_of(cache)
    assert (len(nodes), count) == (MOST_NODES, 3 * MOST_NODES + 1)
    seen = {0}
    for node in nodes:
        assert node.parent in seen
        seen.add(node.uid)
    branches = [node.head[0] for node in nodes[1:]]
    assert branches == list(range(999 + 3 * MOST_NODES, 999 + 2 * MOST_NODES + 1, -1))


def test_no_more_is_looked_at_than_there_is_time_for() -> None:
    cache = RadixCache(page_size=1)
    for branch in range(MOST_VISITED + 50):
        cache.insert(tokens(branch), pages(branch, 1))
    assert nodes_of(cache)[1] == MOST_VISITED


def test_a_long_node_shows_its_beginning() -> None:
    length = MOST_NODE_PAGES + 5
    for cache in (RadixCache(page_size=4), BlockHashCache(page_size=4)):
        cache.insert(pages(0, 4 * length), pages(0, length))
        (node,), _ = nodes_of(cache)
        assert (node.tokens, node.num_pages) == (4 * length, length)
        assert node.head == list(range(HEAD))
        assert node.pages == list(range(MOST_NODE_PAGES))


def test_blocks_in_a_row_are_one_node_until_they_part_or_differ_in_references() -> None:
    cache = BlockHashCache(page_size=1)
    cache.insert(tokens(1, 2, 3, 4), pages(0, 4))
    cache.insert(tokens(1, 2, 8, 9), np.asarray([0, 1, 5, 6], dtype=np.int32))
    cache.lock(cache.match(tokens(1, 2, 8)).handle)
    nodes = by_head(cache)
    assert {head: (node.tokens, node.locks, node.pages) for head, node in nodes.items()} == {
        (1, 2): (2, 1, [0, 1]),
        (3, 4): (2, 0, [2, 3]),
        (8,): (1, 1, [5]),
        (9,): (1, 0, [6]),
    }
    assert nodes[1, 2].parent == 0
    assert nodes[3, 4].parent == nodes[8,].parent == nodes[1, 2].uid
    assert nodes[9,].parent == nodes[8,].uid


def test_a_cache_without_a_tree_shows_none() -> None:
    assert nodes_of(NoPrefixCache(page_size=4)) == ([], 0)
