"""From waiting to running: the queue, and how a request gets a slot and pages."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice

import numpy as np

from minisgl.batch import NewRequest
from minisgl.errors import QueueFull
from minisgl.request import Request
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import MemoryDemand, Policies
from minisgl.table import RunningTable


class WaitingQueue:
    """Requests in order of arrival, preempted ones before all others; at most ``limit`` new ones."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.preempted: dict[int, Request] = {}
        self.new: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self.preempted) + len(self.new)

    def __iter__(self) -> Iterator[Request]:
        yield from self.preempted.values()
        yield from self.new.values()

    @property
    def has_room(self) -> bool:
        """True if another new request may be added."""
        return len(self.new) < self.limit

    def add(self, request: Request) -> None:
        """Append a new request; raises `QueueFull` at the limit."""
        if not self.has_room:
            raise QueueFull(f"{self.limit} requests are waiting already (max_queued_requests); try again later")
        self.new[request.uid] = request

    def put_back(self, request: Request) -> None:
        """Return a preempted request to the head, before all that arrived later."""
        self.preempted[request.uid] = request
        self.preempted = dict(sorted(self.preempted.items()))

    def note_bypass(self, admitted: Request) -> None:
        """Count the bypass for every new request that arrived before ``admitted`` and still waits."""
        for request in self.new.values():
            if request.uid > admitted.uid:
                return
            request.bypassed += 1

    def remove(self, request: Request) -> None:
        """Remove a request, preempted or new."""
        (self.preempted if request.uid in self.preempted else self.new).pop(request.uid)


QUEUE_WINDOW = 1024  # waiting requests that a step looks at, so that a long queue costs no host time


class Admitter:
    """Moves requests from the queue to the running table, as far as the policies and the memory allow."""

    def __init__(self, table: RunningTable, memory: KVMemory, waiting: WaitingQueue, policies: Policies) -> None:
        self.table = table
        self.memory = memory
        self.waiting = waiting
        self.policies = policies
        self._usage = policies.usage_listener

    def candidates(self) -> list[Request]:
        """Requests to consider, in this order: preempted ones by arrival, then new ones by the queue policy."""
        new = list(islice(self.waiting.new.values(), QUEUE_WINDOW))
        return [*self.waiting.preempted.values(), *self.policies.queue.order(new, self._cached_len)]

    def try_admit(self, request: Request) -> NewRequest | None:
        """Give the request a slot and pages for all the tokens that it has, or leave everything as it was.

        A prompt gets all its pages at once, even in chunks, so that two prefills never wait for each other's memory.
        """
        tokens = request.tokens()
        prefix = self.memory.lock_prefix(tokens)
        demand = self._demand(request, len(tokens), len(prefix.pages))
        if demand.now > demand.available or not self.policies.admission.can_admit(demand):
            self.memory.unlock_prefix(prefix)
            return None
        self.waiting.remove(request)
        slot = self.table.admit(request, len(prefix.pages) * self.memory.page_size)
        self.memory.attach(slot, prefix)
        if request.times.admitted == 0.0:
            request.times.admitted = time.perf_counter()
            request.cached_tokens = int(self.table.kv_len[slot])
            if self._usage is not None:
                self._usage.on_admit(request)
        return NewRequest(slot, tokens, request.prompt_len, request.params, request.stop_ids, request.seed)

    def never_fits(self, request: Request) -> bool:
        """Whether the request exceeds the whole pool, or could not be admitted although nothing else runs."""
        num_tokens = request.prompt_len + len(request.output)
        return self.memory.pages_for(num_tokens) > self.memory.num_pages or len(self.table.slots) == 0

    def _cached_len(self, request: Request) -> int:
        return len(self.memory.cache.match(request.tokens()).pages) * self.memory.page_size

    def _demand(self, request: Request, num_tokens: int, cached_pages: int) -> MemoryDemand:
        table, memory = self.table, self.memory
        slots = table.slots
        # The last token of a request is sampled but never fed, so its KV needs no room.
        final_pages = -(-(table.max_len[slots] - 1) // memory.page_size)
        return MemoryDemand(
            now=memory.pages_for(num_tokens) - cached_pages,
            at_most=memory.pages_for(request.max_len - 1) - cached_pages,
            available=memory.available,
            promised=int(np.maximum(final_pages - table.num_pages[slots], 0).sum()),
            running=len(slots),
        )
