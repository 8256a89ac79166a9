"""The queue of requests that have no slot."""

from __future__ import annotations

from collections.abc import Iterator

from minisgl.core.request import Request
from minisgl.errors import QueueFull


class WaitingQueue:
    """Requests in order of arrival, preempted ones before all others.

    Args:
        limit: most new requests that may wait. Preempted ones do not count: they were let in already.
    """

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
        """Append a new request.

        Raises:
            QueueFull: the limit is reached.
        """
        if not self.has_room:
            raise QueueFull(f"{self.limit} requests are waiting already (max_queued_requests); try again later")
        self.new[request.uid] = request

    def put_back(self, request: Request) -> None:
        """Return a preempted request to the head, before all that came later."""
        self.preempted[request.uid] = request
        self.preempted = dict(sorted(self.preempted.items()))

    def note_bypass(self, admitted: Request) -> None:
        """Count it for every new request that came before ``admitted`` and still waits."""
        for request in self.new.values():
            if request.uid > admitted.uid:
                return
            request.bypassed += 1

    def remove(self, request: Request) -> None:
        """Take a request out, wherever it is."""
        (self.preempted if request.uid in self.preempted else self.new).pop(request.uid)
