"""Assignment bug_hunt: the starter. README.md beside this file says what to do."""

from __future__ import annotations

from collections.abc import Callable

from assignments.bug_hunt.page_trie import PageTrie
from minisgl.kvcache.prefix import PrefixCache


class Repaired(PageTrie):
    """The trie with its bugs repaired: override what is wrong."""

    @staticmethod
    def reproduce(make_cache: Callable[[int], PrefixCache]) -> None:
        """The contract test that is missing.

        Raises:
            AssertionError: the cache that ``make_cache(page_size)`` builds has the bug that only the trace shows.
        """
        raise NotImplementedError("Assignment bug_hunt: Repaired.reproduce")
