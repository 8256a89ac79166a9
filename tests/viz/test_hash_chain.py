from __future__ import annotations

import numpy as np
import pytest

from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.viz import Picture, hash_chain
from tests.viz.drawing import assert_sound, boxes, texts

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


def test_text_in_the_place_of_tokens_is_escaped_and_cut(cache: BlockHashCache) -> None:
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
