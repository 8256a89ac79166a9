"""Reference solution of ``fair_queueing``."""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence

from minisgl.request import Request


class FairQueueing:
    """Start-time fair queueing (Goyal et al. 1996) over the virtual tokens of VTC (Sheng et al. 2024).

    ``served`` is what each user has had. ``floor`` is what the user had who was admitted last: all who wait have
    had as much, and a user who comes back with less, after being away, is treated as if they had.
    """

    def __init__(self) -> None:
        self.served: defaultdict[str, int] = defaultdict(int)
        self.floor = 0

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """Merge the users' queues; a request that is taken counts against its user for the rest of the list."""
        queues: defaultdict[str, deque[Request]] = defaultdict(deque)
        for request in waiting:
            queues[request.user].append(request)
        heads = [(self._start(user), queue[0].uid, user) for user, queue in queues.items()]
        heapq.heapify(heads)
        while heads:
            start, _, user = heads[0]
            request = queues[user].popleft()
            yield request
            if queues[user]:
                heapq.heapreplace(heads, (start + request.prompt_len, queues[user][0].uid, user))
            else:
                heapq.heappop(heads)

    def on_admit(self, request: Request) -> None:
        """Charge for the prompt tokens that will be computed."""
        self.floor = self._start(request.user)
        self.served[request.user] = self.floor + request.prompt_len - request.cached_tokens

    def on_finish(self, request: Request) -> None:
        """Charge for the answer."""
        self.served[request.user] += 2 * len(request.output)

    def _start(self, user: str) -> int:
        return max(self.served.get(user, 0), self.floor)
