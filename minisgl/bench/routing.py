"""Which replica gets a request: by turn, by load, by a hash of its beginning, or by what each replica has cached.

A prompt is named page by page, with the chained hashes of `BlockHashCache`, so that routers and replicas mean the same
tokens by the same name. `PrefixIndex` remembers who holds which name. Two routers decide alike and differ in who writes
into that index: `CacheAware` notes what it has sent where (as SGLang's router does with text), `KVAware` is told by the
replicas what they keep and drop (as in vLLM's KV events, llm-d and Dynamo).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from minisgl.kvcache.block_hash import BlockHashCache
from minisgl.registry import Registry
from minisgl.request import Int32Array

InFlight = NDArray[np.int64]  # requests that were sent to each replica and are not finished, [replicas]
PAGE_SIZE = 64  # tokens that a name stands for
LOAD_WEIGHT = 16.0  # pages to compute that a request in flight counts for: 1,024 tokens


class Router(Protocol):
    """Sends each request to one of ``num_replicas`` engines."""

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        """Return the replica for a prompt with these page names (`page_names`)."""
        ...


def page_names(tokens: Int32Array, page_size: int = PAGE_SIZE) -> list[int]:
    """Names of all full pages of a text: each depends on all tokens from the start."""
    data, width, name = tokens.tobytes(), 4 * page_size, 0
    names = []
    for start in range(0, len(data) - width + 1, width):
        name = BlockHashCache.hash_block(name, data[start : start + width])
        names.append(name)
    return names


class RoundRobin:
    """One after the other."""

    def __init__(self, num_replicas: int) -> None:
        self._last, self._num_replicas = -1, num_replicas

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        self._last = (self._last + 1) % self._num_replicas
        return self._last


class LeastLoaded:
    """The replica with the fewest requests in flight; ties go round."""

    def __init__(self, num_replicas: int) -> None:
        self._turns = RoundRobin(num_replicas)

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        turn = self._turns.choose(names, in_flight)
        return int((np.roll(in_flight, -turn).argmin() + turn) % len(in_flight))


class PrefixHash:
    """The replica that a hash of the prompt's first pages names, whatever its load (rendezvous hashing).

    Each replica gives the prompt a number that looks random, and the highest wins. Where a replica is added or leaves,
    only the prompts change place that it wins or has won.
    """

    def __init__(self, num_replicas: int, pages: int = 1) -> None:
        self._replicas = [replica.to_bytes(4, "little") for replica in range(num_replicas)]
        self._pages = pages

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        seed = names[min(self._pages, len(names)) - 1] if names else 0
        scores = [xxhash.xxh64_intdigest(replica, seed=seed) for replica in self._replicas]
        return max(range(len(scores)), key=scores.__getitem__)


class PrefixIndex:
    """Who holds which page of which prompt: for each name the replicas, one bit each.

    Since names are chained, this is a tree of pages whose edges need not be stored.
    """

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, replica: int, names: Sequence[int]) -> None:
        """Note that the replica holds these pages."""
        for name in names:
            self._holders[name] = self._holders.get(name, 0) | 1 << replica

    def remove(self, replica: int, names: Sequence[int]) -> None:
        """Note that it does not, whether or not it was known to; names that nobody holds are forgotten."""
        for name in names:
            left = self._holders.get(name, 0) & ~(1 << replica)
            if left:
                self._holders[name] = left
            else:
                self._holders.pop(name, None)

    def held(self, names: Sequence[int], num_replicas: int) -> NDArray[np.int64]:
        """How many pages from the prompt's start on each replica holds without a gap, int64[num_replicas]."""
        held = np.zeros(num_replicas, dtype=np.int64)
        still = (1 << num_replicas) - 1
        for depth, name in enumerate(names):
            before, still = still, still & self._holders.get(name, 0)
            if before != still and depth:
                held[list(_bits(before & ~still))] = depth
            if not still:
                return held
        held[list(_bits(still))] = len(names)
        return held


def _bits(mask: int) -> Iterator[int]:
    """Positions of the ones."""
    while mask:
        lowest = mask & -mask
        yield lowest.bit_length() - 1
        mask ^= lowest


def cheapest(names: Sequence[int], held: NDArray[np.int64], in_flight: InFlight, load_weight: float) -> int:
    """The replica with the least to do: pages of the prompt that it must compute, and a toll for each request there.

    Of equals, the one with the fewest requests in flight.
    """
    cost = len(names) - held + load_weight * in_flight
    return int(np.lexsort((in_flight, cost))[0])


class CacheAware:
    """Weighs load against the prefix that each replica should have, by what was sent there.

    It knows nothing of answers and evictions: it assumes that a replica keeps the ``capacity`` pages that were sent to
    it last.
    """

    def __init__(self, num_replicas: int, capacity: int = 4096, load_weight: float = LOAD_WEIGHT) -> None:
        self.index = PrefixIndex()
        self._sent: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_replicas)]  # the oldest first
        self._capacity = capacity
        self._load_weight = load_weight

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        held = self.index.held(names, len(in_flight))
        replica = cheapest(names, held, in_flight, self._load_weight)
        self._note(replica, names)
        return replica

    def _note(self, replica: int, names: Sequence[int]) -> None:
        sent = self._sent[replica]
        for name in reversed(names):  # a prefix's end is forgotten before its beginning
            sent[name] = None
            sent.move_to_end(name)
        self.index.add(replica, names)
        while len(sent) > self._capacity:
            self.index.remove(replica, [sent.popitem(last=False)[0]])


class KVAware:
    """Weighs load against the prefix that each replica has, by which pages it has told to have stored and removed."""

    def __init__(self, num_replicas: int, load_weight: float = LOAD_WEIGHT) -> None:
        self.index = PrefixIndex()
        self._load_weight = load_weight

    def choose(self, names: Sequence[int], in_flight: InFlight) -> int:
        return cheapest(names, self.index.held(names, len(in_flight)), in_flight, self._load_weight)

    def stored(self, replica: int, names: Sequence[int]) -> None:
        self.index.add(replica, names)

    def removed(self, replica: int, names: Sequence[int]) -> None:
        self.index.remove(replica, names)


ROUTERS: Registry[Callable[[int], Router]] = {
    "round-robin": RoundRobin,
    "least-loaded": LeastLoaded,
    "prefix-hash": PrefixHash,
    "cache-aware": CacheAware,
    "kv-aware": KVAware,
}
