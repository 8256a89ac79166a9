"""What the contract suite of prefix caches does not see."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from assignments.bug_hunt.page_trie import PageTrie
from assignments.bug_hunt.trace_engine import PAGE_SIZE, TURN_TOKENS, TURNS, launches, trace_conversation
from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.prefix import PREFIX_CACHES, PrefixCache
from minisgl.kvcache.radix import RadixCache
from minisgl.registry import resolve

CONTRACTS = {"make_cache": (PREFIX_CACHES, PrefixCache)}


@pytest.fixture
def make_cache(request: pytest.FixtureRequest) -> Callable[[int], PrefixCache]:
    return resolve("--impl", request.param, PREFIX_CACHES)


class TestRepaired:
    def test_every_turn_finds_all_that_was_said_before(self, make_cache: Callable[[int], PrefixCache]) -> None:
        prefills = [step for step in launches(trace_conversation(make_cache)) if not step["decode"]]
        said = [turn * TURN_TOKENS for turn in range(TURNS)]
        found = [step["cached"][0] for step in prefills]
        wanted = [tokens // PAGE_SIZE * PAGE_SIZE for tokens in said]
        assert found == wanted, f"the turns find {found} cached tokens; all whole pages of what was said are {wanted}"

    @pytest.mark.parametrize("count", [7, 64, 1000])
    def test_a_prefix_is_found_whole(self, make_cache: Callable[[int], PrefixCache], count: int) -> None:
        cache = make_cache(2)
        tokens = np.arange(2 * count, dtype=np.int32)
        cache.insert(tokens, np.arange(count, dtype=np.int32))
        first = cache.match(tokens)
        cache.match(tokens[:2])
        pages = first.pages.tolist()
        assert pages == list(range(count)), (
            f"a prefix of {count} pages was inserted, and {len(pages)} of them are found"
        )


def _fails(reproduce: Callable[[Any], None], cache: Any) -> bool:
    try:
        reproduce(cache)
    except AssertionError:
        return True
    return False


class TestReproduce:
    @pytest.mark.parametrize("right", [RadixCache, BlockHashCache])
    def test_passes_for_a_right_cache(self, make_cache: Any, right: Callable[[int], PrefixCache]) -> None:
        make_cache.reproduce(right)

    def test_fails_for_the_wrong_one(self, make_cache: Any) -> None:
        assert _fails(make_cache.reproduce, PageTrie), "reproduce passes for PageTrie, whose bug it is to show"

    def test_fails_for_the_bug_that_the_contract_suite_does_not_see(self, make_cache: Any) -> None:
        """And not for the other one, which has its test already."""

        class FindsTheFirstPages(RadixCache):
            def match(self, tokens: Any) -> Any:
                return super().match(tokens[: 16 * self.page_size])

        assert _fails(make_cache.reproduce, FindsTheFirstPages), (
            "reproduce passes for a cache that never finds more than 16 pages: it shows the bug that has a test already"
        )
