"""From waiting to running: the queue, and how a request gets a slot and pages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, islice

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

    Clients of a server take turns, and so do the bodies of each client: neither a body with thousands of prompts nor
    a client with thousands of bodies stands before all later ones. Requests without a client are of one and the same.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.preempted: dict[int, Request] = {}
        self.new = _Turns((lambda request: request.client, _body))

    def __len__(self) -> int:
        return len(self.preempted) + len(self.new.requests)

    def __iter__(self) -> Iterator[Request]:
        yield from self.preempted.values()
        yield from self.new.requests.values()

    @property
    def has_room(self) -> bool:
        """True if another new request may be added."""
        return len(self.new.requests) < self.limit

    def add(self, request: Request) -> None:
        """Append a new request; raises `QueueFull` at the limit."""
        if not self.has_room:
            raise QueueFull(f"{self.limit} requests are waiting already (max_queued_requests); try again later")
        self.new.add(request)

    def first(self, count: int) -> list[Request]:
        """The next ``count`` new requests, or all: by arrival, but for the turns of clients and bodies."""
        return list(islice(self.new, count))

    def put_back(self, request: Request) -> None:
        """Return a preempted request to the head, before all that arrived later."""
        self.preempted[request.uid] = request
        self.preempted = dict(sorted(self.preempted.items()))

    def note_bypass(self, admitted: Request) -> None:
        """Count the bypass for new requests that arrived before ``admitted``: those that are next in their bodies."""
        for client in self.new.groups.values():
            for body in client.groups.values():
                request = next(iter(body))
                if request.uid > admitted.uid:
                    break
                request.bypassed += 1

    def remove(self, request: Request) -> None:
        """Remove a request, preempted or new."""
        if self.preempted.pop(request.uid, None) is None:
            self.new.remove(request)


class _Turns:
    """Requests by arrival, of which groups take turns of up to `TURN`; within a group, its own groups do the same.

    ``keys`` are functions of a request that name its group on each level; without keys, there are no groups.
    """

    __slots__ = ("_keys", "_left", "groups", "requests")

    def __init__(self, keys: Sequence[Callable[[Request], int | str]]) -> None:
        self.requests: dict[int, Request] = {}  # of all groups, in order of arrival
        self.groups: dict[int | str, _Turns] = {}  # the one whose turn it is comes first
        self._left: dict[int | str, int] = {}  # requests that a group may still send in its turn, if it has sent some
        self._keys = keys

    def __iter__(self) -> Iterator[Request]:
        if not self._keys:
            return iter(self.requests.values())
        # Long queues are looked at in each step, and most have no turns.
        if len(self.groups) == len(self.requests):
            return chain.from_iterable(group.requests.values() for group in self.groups.values())
        if len(self.groups) == 1:
            return iter(next(iter(self.groups.values())))
        return self._in_turns()

    def _in_turns(self) -> Iterator[Request]:
        # Made while they are read: of a long queue, only the beginning is.
        turns: Iterable[_Turn] = ((iter(group), self._left.get(name, TURN)) for name, group in self.groups.items())
        while True:
            again: list[_Turn] = []
            for requests, turn in turns:
                part = list(islice(requests, turn))
                yield from part
                if len(part) == turn:
                    again.append((requests, TURN))
            if not again:
                return
            turns = again

    def add(self, request: Request) -> None:
        self.requests[request.uid] = request
        if self._keys:
            name = self._keys[0](request)
            if name not in self.groups:
                self.groups[name] = _Turns(self._keys[1:])
            self.groups[name].add(request)

    def remove(self, request: Request) -> None:
        del self.requests[request.uid]
        if not self._keys:
            return
        name = self._keys[0](request)
        group = self.groups[name]
        group.remove(request)
        turn = self._left.pop(name, TURN) - 1
        if not group.requests:
            del self.groups[name]
        elif turn:
            self._left[name] = turn
        else:
            self.groups[name] = self.groups.pop(name)


_Turn = tuple[Iterator[Request], int]  # the rest of a group, and how much of it may come in a row


def _body(request: Request) -> int:
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
        final_pages = memory.most_pages(table.token_len, table.max_len)
        pages = MemoryDemand(
            now=memory.pages_for(num_tokens) - cached_pages,
            at_most=memory.most_pages(num_tokens, request.max_len) - cached_pages,
            available=memory.available,
            promised=int(np.maximum(final_pages - table.num_pages, 0)[table.active].sum()),
            running=len(table.slots),
        )
        return [pages, *memory.window_demands(num_tokens, request.max_len, cached_pages)]
