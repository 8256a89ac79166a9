"""Two ways to load a server, and a clock that tells whether the client keeps up.

In an **open** loop requests come at their times, like visitors: if the server falls behind, they pile up. In a
**closed** loop a fixed number of users each wait for an answer before they ask again, so a slow server is asked less. A
closed loop hides how long people would have waited; an open one can be overrun.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from minisgl.bench.serve.client import Client
from minisgl.bench.serve.records import Record
from minisgl.bench.serve.workload import Planned

_BEAT = 0.01
"""Seconds between two looks at the clock."""


async def open_loop(client: Client, requests: Sequence[Planned]) -> list[Record]:
    """Send each request when it is due, and wait for the end of all."""
    begin = time.perf_counter()
    asked: list[asyncio.Task[Record]] = []
    async with asyncio.TaskGroup() as group:
        for planned in requests:
            due = begin + planned.due
            await asyncio.sleep(max(0.0, due - time.perf_counter()))
            asked.append(group.create_task(client.ask(planned, due)))
    return [task.result() for task in asked]


async def closed_loop(client: Client, requests: Sequence[Planned], users: int) -> list[Record]:
    """Have ``users`` send all requests, each one after another."""
    records: list[Record] = []
    remaining = iter(requests)

    async def user() -> None:
        for planned in remaining:
            records.append(await client.ask(planned))

    async with asyncio.TaskGroup() as group:
        for _ in range(min(users, len(requests))):
            group.create_task(user())
    return records


@dataclass(slots=True)
class Heartbeat:
    """What the client's own event loop went through during a run.

    Args:
        delays: seconds by which each wake-up was late. So late, at worst, is any time in the records.
        in_flight: requests that were under way, integrated over time: request-seconds.
        seconds: of the run.
        cpu: seconds of processor time that this process used.
    """

    delays: list[float] = field(default_factory=list)
    in_flight: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0


@contextlib.asynccontextmanager
async def heartbeat(client: Client) -> AsyncIterator[Heartbeat]:
    """Watch the event loop inside the block."""
    beat = Heartbeat()
    begin, cpu = time.perf_counter(), time.process_time()
    watching = asyncio.create_task(_watch(beat, client))
    try:
        yield beat
    finally:
        watching.cancel()
        beat.seconds, beat.cpu = time.perf_counter() - begin, time.process_time() - cpu


async def _watch(beat: Heartbeat, client: Client) -> None:
    while True:
        before = time.perf_counter()
        await asyncio.sleep(_BEAT)
        elapsed = time.perf_counter() - before
        beat.delays.append(max(0.0, elapsed - _BEAT))
        beat.in_flight += client.in_flight * elapsed
