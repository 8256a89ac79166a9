from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest

from minisgl.attention.cascade import PrefixGroups, find_groups
from minisgl.book import Picture, hash_chain, prefix_groups, radix_tree
from minisgl.book.svg import runs
from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.radix import Node, RadixCache
from minisgl.request import Int32Array
from tests.book.drawing import assert_sound, boxes, texts

# -- radix tree ------------------------------------------------------------------------------------------------------


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


# -- hash chain ------------------------------------------------------------------------------------------------------

PROMPT = np.arange(1, 33, dtype=np.int32)


@pytest.fixture
def cache() -> BlockHashCache:
    """Eight blocks of four, in the pages 40 to 47; two prefixes locked, of two and of three blocks."""
    cache = BlockHashCache(4)
    handle = cache.insert(PROMPT, np.arange(40, 48, dtype=np.int32)).handle
    cache.lock(handle[:3])
    cache.lock(handle[:2])
    return cache


def blocks(picture: Picture) -> list[list[str]]:
    """The lines of each block."""
    found = texts(picture)
    starts = [index for index, text in enumerate(found) if text.startswith("block ")]
    return [found[start : start + 4] for start in starts]


def test_every_block_has_its_tokens_hash_page_and_references(cache: BlockHashCache) -> None:
    prompt = np.concatenate([PROMPT[:16], [9, 9, 9, 9], PROMPT[20:24], [5]]).astype(np.int32)
    picture = hash_chain(cache, prompt)
    keys = [0]
    for start in range(0, 24, 4):
        keys.append(cache.hash_block(keys[-1], prompt[start : start + 4].tobytes()))
    hashes = [f"{key:016x}" for key in keys[1:]]
    states = ["page 40, 2 references", "page 41, 2 references", "page 42, 1 reference", "page 43, evictable"]
    states += ["not cached"] * 2
    assert blocks(picture) == [
        [f"block {index}", " ".join(map(str, prompt[4 * index : 4 * index + 4])), hashes[index][:8] + "…", state]
        for index, state in enumerate(states)
    ]
    assert "25 tokens: 6 full blocks, 4 cached" in texts(picture)
    assert texts(picture)[-1] == "… and 1 token after the last full block: never cached"
    for index, state in enumerate(states):
        assert f"hash {hashes[index]}, {state}." in picture.text.splitlines()[index + 1]
    looks = [box.get("class") or box.get("fill") for box in boxes(picture)]
    assert looks == ["#56b4e9"] * 3 + ["viz-shared"] + ["viz-empty"] * 2
    assert_sound(picture)


def test_a_known_block_after_an_unknown_one_is_not_cached(cache: BlockHashCache) -> None:
    picture = hash_chain(cache, [*range(90, 94), *PROMPT[:8].tolist()])
    assert [lines[3] for lines in blocks(picture)] == ["not cached"] * 3


def test_equal_hashes_are_no_proof(cache: BlockHashCache, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(cache.blocks())
    monkeypatch.setattr(BlockHashCache, "hash_block", staticmethod(lambda parent, tokens: first.key))
    assert [lines[3] for lines in blocks(hash_chain(cache, [7, 7, 7, 7]))] == ["not cached"]
    assert [lines[3] for lines in blocks(hash_chain(cache, [7, 7, 7, 7, *PROMPT[:4]]))] == ["not cached"] * 2
    assert [lines[3] for lines in blocks(hash_chain(cache, PROMPT[:8]))] == ["page 40, 2 references", "not cached"]


def test_arrows_lead_from_block_to_block(cache: BlockHashCache) -> None:
    assert hash_chain(cache, PROMPT[:4]).svg.count("<path") == 0
    assert hash_chain(cache, PROMPT[:16]).svg.count("<path") == 3
    assert hash_chain(cache, PROMPT[:20]).svg.count("<path") == 3 + 2, "an arrow to the next line has its head apart"


def test_text_of_blocks_is_escaped_and_cut(cache: BlockHashCache) -> None:
    picture = hash_chain(cache, PROMPT, lambda tokens: f"<{tokens[0]}>\n&&&&&&&&&&&&&&&&&&&&&")
    assert blocks(picture)[1][1].startswith("<5>\\n&&&")
    assert blocks(picture)[1][1].endswith("…")
    assert_sound(picture)


def test_no_full_block(cache: BlockHashCache) -> None:
    assert hash_chain(cache, []).text == "0 tokens: 0 full blocks, 0 cached."
    short = hash_chain(cache, [1, 2, 3])
    assert boxes(short) == []
    assert "And 3 tokens after the last full block: never cached." in short.text
    assert_sound(short)


def test_a_long_prompt(cache: BlockHashCache) -> None:
    picture = hash_chain(cache, np.arange(1, 1003, dtype=np.int32))
    assert len(boxes(picture)) == 48
    assert texts(picture)[-1] == "… and 202 blocks more, 2 tokens after the last full block: never cached"
    assert picture.text.count("Block ") == 250
    assert_sound(picture)


def test_looking_is_no_use_of_the_cache(cache: BlockHashCache) -> None:
    cache.insert(PROMPT[::-1][:4], np.array([99], dtype=np.int32))
    hash_chain(cache, PROMPT[:16])  # a match of these would make page 43 the last to go
    assert cache.evict(6).tolist() == [47, 46, 45, 44, 43, 99]


# -- prefix groups ---------------------------------------------------------------------------------------------------

PAGES = np.array([[1, 2, 3, 0], [7, 0, 0, 0], [1, 2, 4, 5], [1, 2, 6, 0]], dtype=np.int32)
LENS = np.array([11, 3, 15, 10], dtype=np.int32)
UIDS = [4, 9, 2, 7]


def groups_of(seq_lens: Int32Array, min_rows: int = 2) -> PrefixGroups:
    return find_groups(PAGES, (seq_lens - 1) // 4, page_size=4, min_rows=min_rows, min_pages=1)


def test_a_prefix_is_one_box_beside_all_of_its_rows() -> None:
    picture = prefix_groups(groups_of(LENS), LENS, UIDS)
    assert_sound(picture)
    assert texts(picture)[0] == "4 rows with 39 keys, of which 23 are read"
    shared, *own = boxes(picture)
    assert shared.get("class") == "viz-shared"
    assert [float(box.get("height", "")) for box in (shared, *own)] == [63, 19, 19, 19, 19]
    assert texts(picture)[2:] == ["8", "r4", "3", "r2", "7", "r7", "2", "r9", "3"]
    ends = [float(box.get("x", "")) + float(box.get("width", "")) for box in own]
    assert max(ends) == ends[1]  # the longest row ends last
    assert "r4 + r2 + r7: 8 keys read once.\nr4: 3 keys of its own." in repr(picture)


def test_without_groups_every_row_is_read_alone() -> None:
    picture = prefix_groups(groups_of(LENS, min_rows=4), LENS, UIDS)
    assert texts(picture)[0] == "4 rows with 39 keys, of which 39 are read"
    assert [box.get("class") for box in boxes(picture)] == [None] * 4


def test_pictures_of_a_player_have_one_scale_and_one_height() -> None:
    few = LENS[:1]
    alone = find_groups(PAGES[:1], (few - 1) // 4, page_size=4, min_rows=2, min_pages=1)
    picture = prefix_groups(alone, few, UIDS[:1], most_rows=4, most_keys=15)
    beside = prefix_groups(groups_of(LENS), LENS, UIDS)
    assert_sound(picture)
    assert picture.height == beside.height
    (row,), (shared, own, *_) = boxes(picture), boxes(beside)
    whole = float(own.get("x", "")) + float(own.get("width", "")) - float(shared.get("x", ""))
    assert abs(float(row.get("width", "")) - whole) < 0.01
