from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from minisgl.kvcache.radix import Node, RadixCache
from minisgl.viz import radix_tree
from minisgl.viz.svg import runs
from tests.viz.drawing import assert_sound, boxes, texts


class Filler:
    """A tree, and pages to fill it with: 0, 1, 2, …"""

    def __init__(self, page_size: int) -> None:
        self.cache = RadixCache(page_size)
        self._pages: Iterator[int] = count()

    def add(self, *tokens: int) -> Node:
        prompt = np.array(tokens, dtype=np.int32)
        known = self.cache.match(prompt).pages
        fresh = [next(self._pages) for _ in range(len(tokens) // self.cache.page_size - len(known))]
        handle = self.cache.insert(prompt, np.array([*known, *fresh], dtype=np.int32)).handle
        assert isinstance(handle, Node)
        return handle


@pytest.fixture
def tree() -> Filler:
    """Three prompts that share two pages, the first of them locked, and one that shares nothing."""
    tree = Filler(2)
    tree.cache.lock(tree.add(1, 2, 3, 4, 5, 6))
    tree.add(1, 2, 3, 4, 7, 8, 9, 9)
    tree.add(1, 2, 3, 4, 7, 8, 0, 0)
    tree.add(30, 31)
    tree.cache.check()
    return tree


def test_every_node_has_its_tokens_pages_locks_and_age(tree: Filler) -> None:
    picture = radix_tree(tree.cache)
    found = texts(picture)
    nodes = {node.uid: node for node in tree.cache.nodes()}
    assert len(boxes(picture)) == len(nodes) == 6
    places = [line for line in found if line.startswith("node ")]
    assert sorted(int(line.split()[1]) for line in places) == sorted(nodes)
    for line in places:
        start = found.index(line)
        node = nodes[int(line.split()[1])]
        assert found[start - 1] == " ".join(map(str, node.tokens.tolist()))
        assert f"{len(node.tokens)} tokens" in line
        assert line.endswith(str(node.pages[-1]))
        locks = f"locked {node.lock_count}×" if node.lock_count else "evictable, no. "
        assert found[start + 1].startswith(locks)
        assert found[start + 2] == f"last used at time {node.last_access}"
        parent = f"node {node.parent.uid}" if node.parent and node.parent.uid else "the root"
        assert f"Node {node.uid} below {parent}: " in picture.text
    assert "6 nodes, 7 pages, 4 evictable" in found
    assert {box.get("fill") for box in boxes(picture)} == {None, "#56b4e9"}
    assert_sound(picture)


def test_runs_of_pages_are_written_short() -> None:
    assert runs([3, 5, 6, 7, 9, 8, 8, 2]) == "3 5–7 9 8 8 2"
    assert runs([]) == ""
    long = Filler(1)
    long.add(*range(40))
    assert texts(radix_tree(long.cache))[4] == "node 1 · 40 tokens · pages 0–39"


def test_children_are_below_their_parents_and_further_right(tree: Filler) -> None:
    picture = radix_tree(tree.cache)
    order = [int(line.split()[1]) for line in texts(picture) if line.startswith("node ")]
    corner = {uid: (float(b.get("x", "")), float(b.get("y", ""))) for uid, b in zip(order, boxes(picture), strict=True)}
    for node in tree.cache.nodes():
        if node.parent is not None and node.parent.uid:
            assert corner[node.uid][0] > corner[node.parent.uid][0]
            assert corner[node.uid][1] > corner[node.parent.uid][1]


def test_the_order_of_eviction_is_the_one_that_evict_follows(tree: Filler) -> None:
    found = texts(radix_tree(tree.cache))
    said = {}
    for index, line in enumerate(found):
        if line.startswith("evictable, no. "):
            said[int(line.split()[-1])] = int(found[index - 1].split()[1])
    cache = copy.deepcopy(tree.cache)
    gone = []
    while cache.num_evictable:
        before = {node.uid for node in cache.nodes()}
        while {node.uid for node in cache.nodes()} == before:
            cache.evict(1)
        gone += sorted(before - {node.uid for node in cache.nodes()})
    assert gone == [said[number] for number in sorted(said)]
    assert sorted(said) == [1, 2, 3, 4]


def test_text_in_the_place_of_tokens_is_escaped_and_cut(tree: Filler) -> None:
    picture = radix_tree(tree.cache, lambda tokens: f"<b>\n{'&' * 100}{len(tokens)}")
    shown = texts(picture)[3]
    assert shown.startswith("<b>\\n&&&")
    assert shown.endswith("…")
    assert_sound(picture)


def test_an_empty_tree() -> None:
    picture = radix_tree(RadixCache(4))
    assert "root: nothing is cached" in texts(picture)
    assert picture.text == "Radix tree, pages of 4 tokens: 0 nodes, 0 pages, 0 evictable."
    assert_sound(picture)


def test_deep_and_wide_trees_stay_on_the_card() -> None:
    deep, wide = Filler(1), Filler(1)
    for depth in range(1, 60):
        deep.add(*range(depth), 49_000 + depth)
    for branch in range(200):
        wide.add(branch, *range(50))
    for tree, nodes in ((deep, 117), (wide, 200)):
        picture = radix_tree(tree.cache)
        assert_sound(picture)
        assert len(boxes(picture)) == 80
        assert f"… and {nodes - 80} nodes more" in texts(picture)
        assert picture.text.count("Node ") == nodes


def test_drawing_is_no_use_of_the_cache(tree: Filler) -> None:
    before = {node.uid: (node.last_access, node.lock_count) for node in tree.cache.nodes()}
    radix_tree(tree.cache)
    assert {node.uid: (node.last_access, node.lock_count) for node in tree.cache.nodes()} == before
    tree.cache.check()
