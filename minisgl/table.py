"""The running requests as a structure of arrays: one row (slot) a request, one NumPy array a field.

With Python objects a decode step would cost microseconds a request; with arrays it is a dozen NumPy calls in all.
"""

from __future__ import annotations

import numpy as np

from minisgl.errors import InvariantError
from minisgl.request import Int32Array, Request, RequestState

NO_TOKEN = -1


class RunningTable:
    """Host state of up to ``max_running`` requests.

    Three lengths describe where a request is (all in tokens)::

        kv_len     positions whose KV is computed, or will be by a step already launched
        token_len  tokens that exist, counting one that a launched step is still sampling
        known_len  tokens whose ids the host has seen

    The next step feeds the tokens ``kv_len … token_len``: one token means decode, more mean prefill.
    """

    def __init__(self, max_running: int, max_seq_len: int, max_stop_ids: int = 64) -> None:
        self.max_running = max_running
        self.max_seq_len = max_seq_len
        self.max_stop_ids = max_stop_ids
        rows = max_running
        self.requests: list[Request | None] = [None] * rows
        self.tokens = np.zeros((rows, max_seq_len), dtype=np.int32)
        self.arrival = np.zeros(rows, dtype=np.int64)
        self.kv_len = np.zeros(rows, dtype=np.int32)
        self.token_len = np.zeros(rows, dtype=np.int32)
        self.known_len = np.zeros(rows, dtype=np.int32)
        self.prompt_len = np.zeros(rows, dtype=np.int32)
        self.max_len = np.zeros(rows, dtype=np.int32)
        self.num_pages = np.zeros(rows, dtype=np.int32)  # leading entries of the page-table row that are in use
        self.in_flight = np.zeros(rows, dtype=np.int32)  # launched steps whose results are not processed yet
        self.active = np.zeros(rows, dtype=bool)  # may be scheduled: neither finished, preempted, nor a free slot
        self.prefilling = np.zeros(rows, dtype=bool)  # until the step that feeds the last known token is launched
        self.ended = np.zeros(rows, dtype=bool)  # finished: tokens that a launched step still samples are dropped
        self.watched = np.zeros(rows, dtype=bool)
        self.constrained = np.zeros(rows, dtype=bool)  # has a `TokenConstraint`
        self.stop_ids = np.full((rows, max_stop_ids), NO_TOKEN, dtype=np.int32)
        self._free = list(range(rows - 1, -1, -1))
        self._order: Int32Array = np.zeros(0, dtype=np.int32)

    def __len__(self) -> int:
        return self.max_running - len(self._free)

    @property
    def free_slots(self) -> int:
        return len(self._free)

    @property
    def slots(self) -> Int32Array:
        """Slots of all active requests in order of arrival, int32[n]: the row order of every batch, on every rank."""
        return self._order

    def request(self, slot: int) -> Request:
        request = self.requests[slot]
        if request is None:
            raise InvariantError(f"slot {slot} holds no request")
        return request

    def admit(self, request: Request, cached_len: int) -> int:
        """Give ``request`` a slot, with its first ``cached_len`` positions' KV in place. Returns the slot."""
        slot = self._free.pop()
        tokens = request.tokens()
        length = len(tokens)
        self.requests[slot] = request
        self.tokens[slot, :length] = tokens
        self.arrival[slot] = request.uid
        self.kv_len[slot] = cached_len
        self.token_len[slot] = self.known_len[slot] = length
        self.prompt_len[slot] = request.prompt_len
        self.max_len[slot] = request.max_len
        self.watched[slot] = request.watched
        self.constrained[slot] = request.constraint is not None
        self.stop_ids[slot] = NO_TOKEN
        self.stop_ids[slot, : len(request.stop_ids)] = request.stop_ids
        self.num_pages[slot] = 0
        self.in_flight[slot] = 0
        self.active[slot] = self.prefilling[slot] = True
        self.ended[slot] = False
        request.slot = slot
        request.state = RequestState.PREFILL
        self._reorder()
        return slot

    def output(self, slot: int) -> list[int]:
        """Token ids that the request has generated and the host has seen."""
        tokens: list[int] = self.tokens[slot, self.prompt_len[slot] : self.known_len[slot]].tolist()
        return tokens

    def deactivate(self, slot: int) -> None:
        """Take the request out of scheduling. Its row stays readable until `release`."""
        self.active[slot] = False
        self._reorder()

    def release(self, slot: int) -> Request:
        """Free an inactive slot that no launched step refers to; the request keeps its tokens in ``output``."""
        request = self.request(slot)
        if self.active[slot] or self.in_flight[slot]:
            raise InvariantError(f"slot {slot} (request {request.uid}) is still in use")
        request.output = self.output(slot)
        request.slot = -1
        self.requests[slot] = None
        self._free.append(slot)
        return request

    def _reorder(self) -> None:
        (active,) = self.active.nonzero()
        self._order = active[self.arrival[active].argsort(kind="stable")].astype(np.int32)

    def check(self) -> None:
        """Raise `InvariantError` unless slots, lengths and order are consistent."""
        used = [slot for slot, request in enumerate(self.requests) if request is not None]
        if sorted([*used, *self._free]) != list(range(self.max_running)):
            raise InvariantError("free and used slots do not add up to the table")
        for slot in used:
            if (request := self.request(slot)).slot != slot:
                raise InvariantError(f"slot {slot} holds request {request.uid}, whose slot is {request.slot}")
        kv, tokens, known = self.kv_len[used], self.token_len[used], self.known_len[used]
        if not ((kv <= tokens) & (known <= tokens) & (tokens <= self.max_len[used])).all():
            raise InvariantError("a running request has kv_len or known_len over token_len, or token_len over max_len")
        if not (np.diff(self.arrival[self._order]) > 0).all():
            raise InvariantError("active slots are not in order of arrival")
        if not np.array_equal(np.sort(self._order), np.flatnonzero(self.active)):
            raise InvariantError("the order of arrival does not list the active slots")
