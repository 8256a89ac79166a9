"""Evicted pages in host memory: which are kept (`HostStore`, one an engine), and their copies (`HostPages`, each rank).

A copy has two legs. Between the KV cache and a staging buffer on the device, pages are gathered or scattered by one
kernel for keys and one for values, in the stream of the steps. Between the staging buffer and pinned host memory, a
second stream copies each run of neighbouring slots at once, while steps compute (as SGLang's HiCache and vLLM's KV
offloading do).
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from typing import NamedTuple, Protocol

import numpy as np
import torch

from minisgl.batch import to_device
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.sizing import free_memory
from minisgl.request import Int32Array

STAGING_PAGES = 64  # pages of device memory for copies in flight; 160 MB for a 14B model, 3 ms over PCIe 5
_SAVE, _LOAD = 0, 1
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every device of the process


class PageCopier(Protocol):
    """Copies pages to and from numbered slots of host memory, in the order of the calls.

    Each copy happens after all steps launched so far and before the next, as far as those can tell.
    """

    num_slots: int

    def save(self, pages: Int32Array, slots: Int32Array) -> None:
        """Copy distinct pages, int32[n], to distinct slots, int32[n]. The pages may be reused by the next step."""
        ...

    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        """Copy slots that were saved to distinct pages, which the next step may read."""
        ...


class HostStore:
    """A `PageStore` that keeps as many pages as ``copier`` has slots; the least recently used make room.

    It decides and the copier copies. All ranks of an engine copy alike, so there is one store for them all.
    """

    def __init__(self, copier: PageCopier) -> None:
        self._copier = copier
        self._slots: OrderedDict[bytes, int] = OrderedDict()  # by name, the least recently used first
        self._num_used = 0  # slots that were ever used; the others are above

    def __len__(self) -> int:
        """Pages that are kept."""
        return len(self._slots)

    def save(self, names: Sequence[bytes], pages: Int32Array) -> None:
        """Keep pages; a name that is here already is used, and not copied again."""
        new: dict[bytes, int] = {}
        for name, page in zip(names, pages.tolist(), strict=True):
            if name in self._slots:
                self._slots.move_to_end(name)
            else:
                new[name] = page
        kept = list(new)[-self._copier.num_slots :]  # caches evict the end of a prefix first: keep its beginning
        if kept:
            slots = sorted(self._take(len(kept)))  # neighbours are copied at once
            self._copier.save(_ids(new[name] for name in kept), _ids(slots))
            self._slots.update(zip(kept, slots, strict=True))

    def restore(self, names: Sequence[bytes], pages: Int32Array) -> int:
        """Fill pages up to the first missing name. A prefix's beginning counts as used after its end."""
        found = list(takewhile(self._slots.__contains__, names))
        for name in reversed(found):
            self._slots.move_to_end(name)
        if found:
            slots = _ids(self._slots[name] for name in found)
            order = np.argsort(slots)  # neighbours again, whatever the order in which they were evicted
            self._copier.load(slots[order], pages[: len(found)][order])
        return len(found)

    def _take(self, count: int) -> list[int]:
        """Slots for ``count`` pages: unused ones, then those of the least recently used pages."""
        first = self._num_used
        self._num_used = min(first + count, self._copier.num_slots)
        slots = list(range(first, self._num_used))
        return slots + [self._slots.popitem(last=False)[1] for _ in range(count - len(slots))]


def host_store(kv_cache: KVCache, num_slots: int = 1024) -> HostStore:
    """A host store for the KV cache of a single rank."""
    return HostStore(HostPages(kv_cache, num_slots))


def slots_that_fit(gib: float, page_bytes: int, num_ranks: int) -> int:
    """Pages that ``gib`` GiB hold for all ranks, where a page has ``page_bytes`` on each; `ConfigError` for none."""
    slots = int(gib * 2**30) // (page_bytes * num_ranks)
    if slots == 0:
        raise ConfigError(
            f"page_store_gib: {gib:g} GiB hold no page of {page_bytes * num_ranks} bytes; raise it, or lower page_size"
        )
    return slots


def check_host_memory(gib: float) -> None:
    """Raise `ConfigError` if the machine has not so many GiB of memory left."""
    free = free_memory(torch.device("cpu"))
    if gib * 2**30 > free:
        raise ConfigError(f"page_store_gib: {gib:g} GiB do not fit into the {free / 2**30:.1f} GiB of free host memory")


class _Half(NamedTuple):
    """Keys or values."""

    cache: torch.Tensor  # [pages, layers, words], a view of the KV cache
    staging: torch.Tensor  # [2, pages, layers, words] on the device: two buffers that take turns
    host: torch.Tensor  # [slots, layers, words]


class HostPages:
    """The `PageCopier` of one rank. On CUDA its memory is pinned, and nothing here waits for the device.

    A step waits for a copy in two cases: its own requests' pages are loaded (at the speed of the bus, less what came
    while the step before ran), or it evicted more pages than the staging buffer has room for.

    Args:
        kv_cache: to copy from and to.
        num_slots: pages of host memory.
        staging_pages: pages of device memory for copies in flight.
        shared: other host pages whose memory this one uses, so that an engine can load what another has saved. Nothing
            orders the copies of the two: `synchronize` one before the other.
    """

    def __init__(
        self,
        kv_cache: KVCache,
        num_slots: int,
        staging_pages: int = STAGING_PAGES,
        shared: HostPages | None = None,
    ) -> None:
        self.num_slots = num_slots
        self.device = kv_cache.k.device
        self._chunk = max(1, min(staging_pages, kv_cache.num_pages) // 2)
        self._unpin: list[Callable[[], object]] = []
        theirs = [None, None] if shared is None else [half.host for half in shared._halves]
        self._halves: list[_Half] = [self._half(*each) for each in zip((kv_cache.k, kv_cache.v), theirs, strict=True)]
        self._turn = 0
        on_cuda = self.device.type == "cuda"
        self._copies = torch.cuda.Stream(self.device) if on_cuda else None
        self._idle = [torch.cuda.Event() for _ in range(2)] if on_cuda else []  # when a staging buffer is free again

    def _half(self, memory: torch.Tensor, host: torch.Tensor | None) -> _Half:
        cache = _words(memory).transpose(0, 1)
        shape = cache.shape[1:]
        staging = cache.new_empty((2, self._chunk, *shape))
        if host is None:
            host = torch.empty((self.num_slots, *shape), dtype=cache.dtype)
            if self.device.type == "cuda":
                self._unpin.append(_pin(self, host, self.device))
        return _Half(cache, staging, host)

    def synchronize(self) -> None:
        """Wait until all copies so far are in host memory, or have left it."""
        if self._copies is not None:
            self._copies.synchronize()

    def close(self) -> None:
        """Free the memory; calling it again does nothing."""
        self._halves.clear()
        for unpin in self._unpin:
            unpin()

    def run(self, moves: Int32Array) -> None:
        """Copy what `QueuedCopies.take` has returned, on another rank or in the driver."""
        table = moves.reshape(-1, 3)
        for part in np.split(table, np.flatnonzero(np.diff(table[:, 0])) + 1):
            kind, pages, slots = part[0, 0], part[:, 1].copy(), part[:, 2].copy()
            if kind == _SAVE:
                self.save(pages, slots)
            else:
                self.load(slots, pages)

    @torch.inference_mode()
    def save(self, pages: Int32Array, slots: Int32Array) -> None:
        """Copy pages, int32[n], to slots, int32[n], of host memory."""
        index = to_device({"pages": pages}, self.device)["pages"]
        for turn, part in self._chunks(len(pages)):
            if self._copies is not None:
                self._steps.wait_event(self._idle[turn])
            for half in self._halves:
                torch.index_select(half.cache, 0, index[part], out=half.staging[turn, : len(slots[part])])
            if self._copies is not None:
                self._copies.wait_stream(self._steps)
            with self._copy_stream():
                for staged, kept in _runs(slots[part]):
                    for half in self._halves:
                        half.host[kept].copy_(half.staging[turn, staged], non_blocking=True)
            if self._copies is not None:
                self._idle[turn].record(self._copies)

    @torch.inference_mode()
    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        """Copy slots, int32[n], to pages, int32[n]."""
        index = to_device({"pages": pages}, self.device)["pages"].long()
        for turn, part in self._chunks(len(pages)):
            if self._copies is not None:
                self._copies.wait_event(self._idle[turn])
            with self._copy_stream():
                for staged, kept in _runs(slots[part]):
                    for half in self._halves:
                        half.staging[turn, staged].copy_(half.host[kept], non_blocking=True)
            if self._copies is not None:
                self._steps.wait_stream(self._copies)
            for half in self._halves:
                half.cache.index_copy_(0, index[part], half.staging[turn, : len(slots[part])])
            if self._copies is not None:
                self._idle[turn].record(self._steps)

    def _chunks(self, count: int) -> Iterator[tuple[int, slice]]:
        """Parts of at most half of the staging buffer, each with the number of the half that it gets."""
        for begin in range(0, count, self._chunk):
            self._turn = 1 - self._turn
            yield self._turn, slice(begin, begin + self._chunk)

    @property
    def _steps(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def _copy_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._copies is None else torch.cuda.stream(self._copies)


class QueuedCopies:
    """The `PageCopier` of a driver: it notes the copies, which travel to the ranks with the next step."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._moves: list[Int32Array] = []

    def save(self, pages: Int32Array, slots: Int32Array) -> None:
        """Note copies of pages to slots."""
        self._note(_SAVE, pages, slots)

    def load(self, slots: Int32Array, pages: Int32Array) -> None:
        """Note copies of slots to pages."""
        self._note(_LOAD, pages, slots)

    def take(self) -> Int32Array:
        """All copies since the last call, in order: int32[3 × n], for each its kind, page and slot."""
        moves, self._moves = self._moves, []
        return np.concatenate([np.zeros(0, dtype=np.int32), *moves])

    def _note(self, kind: int, pages: Int32Array, slots: Int32Array) -> None:
        self._moves.append(np.stack([np.full_like(pages, kind), pages, slots], axis=1).ravel())


def _ids(numbers: Iterable[int]) -> Int32Array:
    return np.fromiter(numbers, dtype=np.int32)


def _runs(slots: Int32Array) -> Iterator[tuple[slice, slice]]:
    """Runs of neighbouring slots: where they are in ``slots``, and which they are."""
    ends = np.append(np.flatnonzero(np.diff(slots) != 1) + 1, len(slots)).tolist()
    begin = 0
    for end in ends:
        yield slice(begin, end), slice(int(slots[begin]), int(slots[begin]) + end - begin)
        begin = end


def _words(memory: torch.Tensor) -> torch.Tensor:
    """View keys or values as [layers, pages, words] of eight bytes, or of one: kernels then move fewer elements."""
    content = memory.flatten(2)
    wide = content.shape[2] * content.element_size() % 8 == 0
    return content.view(torch.int64 if wide else torch.uint8)


def _pin(owner: object, host: torch.Tensor, device: torch.device) -> Callable[[], object]:
    """Pin memory until ``owner`` is gone, or the result is called. PyTorch would round up to a power of two of bytes.

    Raises `ConfigError` if the system refuses.
    """
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(host.data_ptr(), host.nbytes, _PORTABLE)) != 0:
        raise ConfigError(
            f"page_store_gib: the system refuses to pin {host.nbytes} bytes of host memory; lower it, or raise the "
            "limit (ulimit -l)"
        )
    return weakref.finalize(owner, _unpin, host, device)


def _unpin(host: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # a copy may still be under way
    torch.cuda.cudart().cudaHostUnregister(host.data_ptr())
