"""Assignment fair_queueing: the starter. README.md beside this file says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from minisgl.request import Request


class FairQueueing:
    """Put the user first who has been served least."""

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """See `minisgl.scheduler.policy.QueuePolicy`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.order")

    def on_admit(self, request: Request) -> None:
        """See `minisgl.scheduler.policy.UsageListener`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.on_admit")

    def on_finish(self, request: Request) -> None:
        """See `minisgl.scheduler.policy.UsageListener`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.on_finish")
