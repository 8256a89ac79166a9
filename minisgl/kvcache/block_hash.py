"""A prefix cache as a hash table of full blocks (vLLM's automatic prefix caching; nano-vllm)."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import xxhash

from minisgl.errors import InvariantError
from minisgl.kvcache.prefix import InsertResult, MatchResult
from minisgl.request import Int32Array


@dataclass(eq=False, slots=True)
class Block:
    """One cached page, or *block*; the first one of a prompt has no parent.

    ``key`` is a 64-bit hash of the whole prefix that ends here; ``tokens`` are the block's own, as the bytes of
    int32[page_size]. ``ref_count`` counts locks on prefixes that contain it.
    """

    page: int
    key: int
    tokens: bytes
    parent: Block | None
    ref_count: int = 0


class BlockHashCache:
    """Prefix cache as a hash table: a block's key is the hash of its parent's key and its own tokens.

    A handle is the tuple of the prefix's blocks. Unreferenced blocks keep their content and are evicted least recently
    used first and, within a prefix, children before parents.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self._blocks: dict[int, Block] = {}
        self._unreferenced: OrderedDict[Block, None] = OrderedDict()

    @staticmethod
    def hash_block(parent_key: int, tokens: bytes) -> int:
        """Key of a block: xxh64 of its tokens, seeded with its parent's key (0 for the first block)."""
        return xxhash.xxh64_intdigest(tokens, seed=parent_key)

    @property
    def num_pages(self) -> int:
        """Pages the cache owns."""
        return len(self._blocks)

    @property
    def num_evictable(self) -> int:
        """Pages in no locked prefix."""
        return len(self._unreferenced)

    def match(self, tokens: Int32Array) -> MatchResult:
        """Find the longest cached prefix of ``tokens`` (int32[any]), block by block."""
        blocks = self._look_up(self._chunks(tokens))
        self._mark_used(blocks)
        return MatchResult(_pages(blocks), tuple(blocks))

    def insert(self, tokens: Int32Array, pages: Int32Array) -> InsertResult:
        """Add a block for each page beyond the cached prefix; the tokens must fill the pages exactly."""
        if len(tokens) != len(pages) * self.page_size:
            raise InvariantError(f"{len(pages)} pages of {self.page_size} tokens cannot hold {len(tokens)} tokens")
        chunks = self._chunks(tokens)
        blocks = self._look_up(chunks)
        known = len(blocks)
        for chunk, page in zip(chunks[known:], pages[known:].tolist(), strict=True):
            parent = blocks[-1] if blocks else None
            key = self.hash_block(parent.key if parent else 0, chunk)
            if key in self._blocks:  # taken by another prefix: a collision, so this one stays uncached from here on
                break
            self._blocks[key] = Block(page, key, chunk, parent)
            blocks.append(self._blocks[key])
        self._mark_used(blocks)
        return InsertResult(_pages(blocks), tuple(blocks))

    def extend(self, handle: tuple[Block, ...], tokens: Int32Array, page: int) -> tuple[Block, ...] | None:
        """Add a block behind a locked prefix, unless its key is taken."""
        parent = handle[-1] if handle else None
        chunk = np.asarray(tokens, dtype=np.int32).tobytes()
        key = self.hash_block(parent.key if parent else 0, chunk)
        if key in self._blocks:
            return None
        self._blocks[key] = Block(page, key, chunk, parent, ref_count=1)
        return (*handle, self._blocks[key])

    def lock(self, handle: Sequence[Block]) -> None:
        """Reference every block of the prefix; raises `InvariantError` if one was evicted since it was matched."""
        for block in handle:
            if block.ref_count == 0:
                if block not in self._unreferenced:
                    raise InvariantError(f"page {block.page} was evicted before its handle was locked")
                del self._unreferenced[block]
            block.ref_count += 1

    def unlock(self, handle: Sequence[Block]) -> None:
        """Undo one `lock`; blocks without references join the end of the queue, children first."""
        for block in reversed(handle):
            if block.ref_count == 0:
                raise InvariantError(f"page {block.page} is unlocked more often than it was locked")
            block.ref_count -= 1
            if block.ref_count == 0:
                self._unreferenced[block] = None

    def evict(self, count: int) -> Int32Array:
        """Forget ``min(count, num_evictable)`` blocks from the head of the queue, and return their pages, int32."""
        evicted = [self._unreferenced.popitem(last=False)[0] for _ in range(min(count, self.num_evictable))]
        for block in evicted:
            del self._blocks[block.key]
        return _pages(evicted)

    def blocks(self) -> Iterator[Block]:
        """All blocks, each after its parent."""
        yield from self._blocks.values()

    def held_pages(self) -> Int32Array:
        """Pages of all blocks, int32[num_pages]."""
        return _pages(list(self._blocks.values()))

    def check(self) -> None:
        """Raise `InvariantError` unless keys, parents, reference counts and the queue agree."""
        references_below: Counter[Block | None] = Counter()
        for key, block in self._blocks.items():
            if block.parent is not None and self._blocks.get(block.parent.key) is not block.parent:
                raise InvariantError(f"page {block.page} is cached and the page before it is not")
            if key != block.key or key != self.hash_block(block.parent.key if block.parent else 0, block.tokens):
                raise InvariantError(f"page {block.page} is cached under a key that is not its own")
            if (block.ref_count == 0) != (block in self._unreferenced):
                raise InvariantError(f"page {block.page} has {block.ref_count} references, but the queue disagrees")
            references_below[block.parent] += block.ref_count
        if any(references_below[block] > block.ref_count for block in self._blocks.values()):
            raise InvariantError("a page has fewer references than the pages after it")
        held = self.held_pages()
        if len(np.unique(held)) != len(held):
            raise InvariantError("a page is cached twice")
        self._check_queue()

    def _check_queue(self) -> None:
        earlier: set[Block] = set()
        for block in self._unreferenced:
            if self._blocks.get(block.key) is not block:
                raise InvariantError(f"page {block.page} waits for eviction and is not cached")
            if block.parent in earlier:
                raise InvariantError(f"page {block.page} would be evicted after the page before it")
            earlier.add(block)

    def _look_up(self, chunks: list[bytes]) -> list[Block]:
        """Blocks of the longest cached prefix."""
        blocks: list[Block] = []
        parent, key = None, 0
        for chunk in chunks:
            key = self.hash_block(key, chunk)
            block = self._blocks.get(key)
            # Equal hashes are no proof: compare tokens and parent, which by induction compares the whole prefix.
            if block is None or block.tokens != chunk or block.parent is not parent:
                break
            blocks.append(block)
            parent = block
        return blocks

    def _mark_used(self, blocks: list[Block]) -> None:
        """Move unreferenced blocks to the end of the queue, the last block first: a parent outlives its children."""
        for block in reversed(blocks):
            if block.ref_count == 0:
                self._unreferenced[block] = None
                self._unreferenced.move_to_end(block)

    def _chunks(self, tokens: Int32Array) -> list[bytes]:
        # The tokens of each full block, as bytes.
        data = np.asarray(tokens, dtype=np.int32).tobytes()
        width = 4 * self.page_size
        return [data[start : start + width] for start in range(0, len(data) - width + 1, width)]


def _pages(blocks: Sequence[Block]) -> Int32Array:
    return np.array([block.page for block in blocks], dtype=np.int32)
