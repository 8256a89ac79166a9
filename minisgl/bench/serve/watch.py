"""Whether a server gives back what it takes: memory, sockets, pages and requests, before, during and after a load."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from minisgl.bench.serve.client import Target
from minisgl.bench.serve.gauges import Gauges, read_gauges
from minisgl.bench.serve.processes import ProcessTree

_PERIOD = 0.5
"""Seconds between two samples of memory."""
_SETTLE_TIMEOUT = 5.0
"""Seconds that a server has to forget the clients that left last."""
_ENOUGH = 20
"""Samples of the second half, of which a trend is worth something."""


@dataclass(slots=True)
class Watch:
    """What was seen of a server around one load.

    Args:
        tree: its processes.
        before, after: open files by kind of process, before the load and when it had settled afterwards.
        gauges: at the end; None if the server shows none.
        times: of the samples, in seconds since the beginning.
        resident: bytes of memory by kind of process, for each sample.
    """

    tree: ProcessTree
    before: dict[str, int] = field(default_factory=dict)
    after: dict[str, int] = field(default_factory=dict)
    gauges: Gauges | None = None
    times: list[float] = field(default_factory=list)
    resident: list[dict[str, int]] = field(default_factory=list)

    def memory(self, kind: str) -> list[int]:
        """Bytes of all samples of one kind."""
        return [sample.get(kind, 0) for sample in self.resident]

    @property
    def total(self) -> list[int]:
        """Bytes of all processes, for each sample."""
        return [sum(sample.values()) for sample in self.resident]

    @property
    def curve(self) -> list[float]:
        """Total MiB over time, in at most 100 points at equal distances."""
        every = -(-len(self.resident) // 100)
        return [round(value / 2**20, 1) for value in self.total[:: max(1, every)]]

    def growth(self, values: Sequence[int]) -> float | None:
        """Bytes by which memory grew over the second half of the load, by a straight line through its samples.

        None if there are too few: what grows over seconds is warming up.
        """
        half = self.times[-1] / 2 if self.times else 0.0
        late = [index for index, now in enumerate(self.times) if now >= half]
        if len(late) < _ENOUGH:
            return None
        slope, _ = np.polyfit([self.times[index] for index in late], [values[index] for index in late], deg=1)
        return float(slope) * half


@contextlib.asynccontextmanager
async def watched(tree: ProcessTree, target: Target) -> AsyncIterator[Watch]:
    """Watch the server inside the block, and let it settle at its end."""
    watch = Watch(tree, before=tree.descriptors())
    begin = time.perf_counter()
    sampling = asyncio.create_task(_sample(watch, begin))
    try:
        yield watch
    finally:
        sampling.cancel()
    await _settle(watch, target)


async def _sample(watch: Watch, begin: float) -> None:
    while True:
        watch.times.append(time.perf_counter() - begin)
        watch.resident.append(watch.tree.resident())
        await asyncio.sleep(_PERIOD)


async def _settle(watch: Watch, target: Target) -> None:
    deadline = time.monotonic() + _SETTLE_TIMEOUT
    while True:
        watch.gauges = await asyncio.to_thread(read_gauges, target.host, target.port)
        watch.after = watch.tree.descriptors()
        closed = sum(watch.after.values()) <= sum(watch.before.values())
        if (closed and (watch.gauges is None or watch.gauges.idle)) or time.monotonic() > deadline:
            return
        await asyncio.sleep(0.1)
