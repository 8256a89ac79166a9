"""Which pages the prefix cache has stored and removed, as the events that vLLM publishes for routers.

Names, order and tags are those of vLLM's ``KVEventBatch``: in MessagePack, a batch is an array, and its events are maps
(arrays in vLLM's first versions, which its routers refuse by now). A page of ours is a block there.
"""

from __future__ import annotations

import msgspec

from minisgl.kvcache.page_store import PageNames
from minisgl.request import Int32Array

MEDIUM = "GPU"  # vLLM's name for the first tier; on a CPU too, since routers know no other


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """Consecutive pages of a prefix are cached. A block's hash tells its whole prefix; it means nothing elsewhere."""

    block_hashes: list[int]
    parent_block_hash: int | None  # of the page before the first; None at the start of a prompt
    token_ids: list[int]  # of all these blocks
    block_size: int
    lora_id: int | None = None
    medium: str | None = MEDIUM
    lora_name: str | None = None


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """Pages were evicted."""

    block_hashes: list[int]
    medium: str | None = MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag=True):
    """Nothing is cached any more."""


KVEvent = BlockStored | BlockRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True, array_like=True):
    """Events of one step, in order. ``ts`` is seconds since 1970."""

    ts: float
    events: list[KVEvent]
    data_parallel_rank: int | None = 0


class KVEventLog:
    """A `CacheListener` that keeps what happened as events, until they are taken. Works with every prefix cache."""

    def __init__(self, page_size: int) -> None:
        self._names = PageNames(page_size)
        self._events: list[KVEvent] = [AllBlocksCleared()]  # an engine that was restarted has lost what it had

    def take(self) -> list[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events

    def note(self, tokens: Int32Array, pages: Int32Array) -> None:
        """Pages of a prefix are cached; those that are new make an event."""
        new = self._names.note(tokens, pages)
        known = len(pages) - len(new)
        if new:
            self._stored(new, int(pages[known - 1]) if known else None, tokens[known * self._names.page_size :])

    def extend(self, tokens: Int32Array, page: int, before: int | None) -> None:
        """One page more of a prefix is cached."""
        self._stored([self._names.extend(tokens, page, before)], before, tokens)

    def save(self, pages: Int32Array) -> None:
        """Pages were evicted."""
        if len(pages) > 0:
            removed = BlockRemoved([_hash(name) for name in self._names.drop(pages)])
            self._events.append(removed if len(self._names) else AllBlocksCleared())

    def forget(self, pages: Int32Array) -> None:
        """Pages were dropped, which is no different for those who read the events."""
        self.save(pages)

    def settle(self) -> None:
        """Steps are complete: no event."""

    def _stored(self, names: list[bytes], before: int | None, tokens: Int32Array) -> None:
        parent = None if before is None else _hash(self._names.of(before))
        hashes = [_hash(name) for name in names]
        self._events.append(BlockStored(hashes, parent, tokens.tolist(), self._names.page_size))


def _hash(name: bytes) -> int:
    """64 bits of a page's name; some readers take no more."""
    return int.from_bytes(name[:8], "big")
