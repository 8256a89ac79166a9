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

TURN = 32  # requests of one group that may leave the queue before another's turn; no option, as all get as many


class WaitingQueue:
    """Requests in order of arrival, preempted ones before all others; at most ``limit`` new ones.

    Groups of requests take turns, so that a body with thousands of prompts does not stand before all later ones.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.preempted: dict[int, Request] = {}
        self.new: dict[int, Request] = {}
        self._groups: dict[int, dict[int, Request]] = {}  # the new ones; the group whose turn it is comes first
        self._turns: dict[int, int] = {}  # requests that a group may still send in its turn, if it has sent some

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
        self._groups.setdefault(_group(request), {})[request.uid] = request

    def first(self, count: int) -> list[Request]:
        """The next ``count`` new requests, or all: by arrival, but at most `TURN` of a group in a row."""
        if len(self._groups) == len(self.new):  # as if there were no groups
            return list(islice(self.new.values(), count))
        chosen: list[Request] = []
        turns = [(iter(requests.values()), self._turns.get(group, TURN)) for group, requests in self._groups.items()]
        while turns and len(chosen) < count:
            again = []
            for requests, turn in turns:
                part = list(islice(requests, turn))
                chosen += part
                if len(part) == turn:
                    again.append((requests, TURN))
            turns = again
        return chosen[:count]

    def put_back(self, request: Request) -> None:
        """Return a preempted request to the head, before all that arrived later."""
        self.preempted[request.uid] = request
        self.preempted = dict(sorted(self.preempted.items()))

    def note_bypass(self, admitted: Request) -> None:
        """Count the bypass for new requests that arrived before ``admitted``: those that are next in their groups."""
        for requests in self._groups.values():
            request = next(iter(requests.values()))
            if request.uid > admitted.uid:
                return
            request.bypassed += 1

    def remove(self, request: Request) -> None:
        """Remove a request, preempted or new."""
        if self.preempted.pop(request.uid, None) is not None:
            return
        del self.new[request.uid]
        group = _group(request)
        requests = self._groups[group]
        del requests[request.uid]
        turn = self._turns.pop(group, TURN) - 1
        if not requests:
            del self._groups[group]
        elif turn:
            self._turns[group] = turn
        else:
            self._groups[group] = self._groups.pop(group)


def _group(request: Request) -> int:
    return request.uid if request.group is None else request.group


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
        new = self.waiting.first(QUEUE_WINDOW)
        return [*self.waiting.preempted.values(), *self.policies.queue.order(new, self._cached_len)]

    def try_admit(self, request: Request) -> NewRequest | None:
        """Give the request a slot and pages for all the tokens that it has, or leave everything as it was.

        A prompt gets all its pages at once, even in chunks, so that two prefills never wait for each other's memory.
        """
        tokens = request.tokens()
        prefix = self.memory.lock_prefix(tokens)
        demands = self._demands(request, len(tokens), len(prefix.pages))
        if not all(each.now <= each.available and self.policies.admission.can_admit(each) for each in demands):
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
        return len(self.memory.match(request.tokens()).pages) * self.memory.page_size

    def _demands(self, request: Request, num_tokens: int, cached_pages: int) -> list[MemoryDemand]:
        table, memory = self.table, self.memory
        slots = table.slots
        final_pages = memory.most_pages(table.token_len[slots], table.max_len[slots])
        pages = MemoryDemand(
            now=memory.pages_for(num_tokens) - cached_pages,
            at_most=memory.most_pages(num_tokens, request.max_len) - cached_pages,
            available=memory.available,
            promised=int(np.maximum(final_pages - table.num_pages[slots], 0).sum()),
            running=len(slots),
        )
        return [pages, *memory.window_demands(num_tokens, request.max_len, cached_pages)]
