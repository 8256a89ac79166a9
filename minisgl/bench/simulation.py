"""The real scheduler on a device that only takes time, and no time of yours."""

from __future__ import annotations

from collections.abc import Callable

from minisgl.bench.host import NullExecutor
from minisgl.core.batch import Batch, PendingStep


class SimulatedDevice(NullExecutor):
    """An `Executor` that computes nothing and moves a clock forward by what each step would take.

    Args:
        seconds: that a step takes.
    """

    def __init__(self, seconds: Callable[[Batch], float]) -> None:
        self.seconds = seconds
        self.now = 0.0
        """Seconds since the beginning, on the device's clock."""

    def launch(self, batch: Batch) -> PendingStep:
        self.now += self.seconds(batch)
        return super().launch(batch)
