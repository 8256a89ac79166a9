"""What a router knows of one worker's prefix cache from its events alone, and what the cache really holds."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent
from minisgl.kvcache.prefix import PrefixCache
from minisgl.kvcache.radix import RadixCache

Prefix = tuple[int, ...]


class KVIndex:
    """Follows events, strictly: one that contradicts those before it is an error."""

    def __init__(self) -> None:
        self.prefixes: dict[int, Prefix] = {}
        """All tokens up to the end of each block, by its hash."""

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            match event:
                case BlockStored(hashes, parent, tokens, size):
                    assert len(tokens) == len(hashes) * size
                    prefix: Prefix = () if parent is None else self.prefixes[parent]
                    for number, key in enumerate(hashes):
                        prefix += tuple(tokens[number * size : (number + 1) * size])
                        assert key not in self.prefixes, "stored twice"
                        self.prefixes[key] = prefix
                case BlockRemoved(hashes):
                    for key in hashes:
                        del self.prefixes[key]
                case AllBlocksCleared():
                    self.prefixes.clear()


def cached_prefixes(cache: PrefixCache) -> list[Prefix]:
    """All tokens up to the end of each page that the cache holds, sorted."""
    found: list[Prefix] = []
    if isinstance(cache, RadixCache):
        for node in cache.nodes():
            before: Prefix = ()
            parent = node.parent
            while parent is not None:
                before, parent = tuple(parent.tokens.tolist()) + before, parent.parent
            tokens, size = node.tokens.tolist(), cache.page_size
            found += [before + tuple(tokens[:end]) for end in range(size, len(tokens) + 1, size)]
    else:
        assert isinstance(cache, BlockHashCache)
        for block in cache.blocks():
            tokens = b""
            link = block
            while link is not None:
                tokens, link = link.tokens + tokens, link.parent
            found.append(tuple(memoryview(tokens).cast("i")))
    return sorted(found)
