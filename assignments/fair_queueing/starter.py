"""Assignment fair_queueing: the starter. README.md beside this file says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from minisgl.core import Request


class FairQueueing:
    """Whoever has been served least goes first."""

    def arrange(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        """See `minisgl.scheduler.policy.Order`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.arrange")

    def on_admit(self, request: Request) -> None:
        """See `minisgl.scheduler.policy.Account`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.on_admit")

    def on_finish(self, request: Request) -> None:
        """See `minisgl.scheduler.policy.Account`."""
        raise NotImplementedError("Assignment fair_queueing: FairQueueing.on_finish")
