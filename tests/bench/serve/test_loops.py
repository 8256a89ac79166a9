"""Open and closed loops, on a client that only takes its time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from minisgl.bench.serve.client import Client, Target
from minisgl.bench.serve.loops import Heartbeat, closed_loop, heartbeat, open_loop
from minisgl.bench.serve.records import Record
from minisgl.bench.serve.workload import Planned
from tests.bench.serve.records import planned, record


class SlowClient(Client):
    """Answers every request after some seconds."""

    def __init__(self, seconds: float) -> None:
        super().__init__(Target("127.0.0.1", 1, "m", 10), seed=0, timeout=1.0)
        self.seconds = seconds
        self.most = 0

    async def ask(self, planned: Planned, due: float | None = None) -> Record:
        sent = time.perf_counter()
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        await self.answer()
        self.in_flight -= 1
        return record(sent if due is None else due, time.perf_counter(), planned=planned, sent=sent)

    async def answer(self) -> None:
        await asyncio.sleep(self.seconds)


def run_open(client: Client, requests: Sequence[Planned]) -> list[Record]:
    return asyncio.run(open_loop(client, requests))


def test_an_open_loop_waits_for_nobody() -> None:
    class Reluctant(SlowClient):
        """Answers nobody before all have asked."""

        async def answer(self) -> None:
            if self.in_flight == 10:
                all_have_asked.set()
            await asyncio.wait_for(all_have_asked.wait(), 60.0)

    client, all_have_asked = Reluctant(0.0), asyncio.Event()
    requests = [planned(index, due=0.01 * index) for index in range(10)]
    records = run_open(client, requests)
    assert client.most == 10
    assert [each.planned for each in records] == requests
    first = records[0].due
    for number, each in enumerate(records):
        assert abs(each.due - first - 0.01 * number) < 1e-6
        assert each.sent >= each.due


def test_what_a_late_client_does_to_a_request_counts() -> None:
    class Busy(SlowClient):
        async def ask(self, planned: Planned, due: float | None = None) -> Record:
            time.sleep(0.05)
            return await super().ask(planned, due)

    records = run_open(Busy(0.0), [planned(index) for index in range(3)])
    assert all(each.sent - each.due >= 0.05 * number for number, each in enumerate(records, start=1))
    assert all(each.ttft >= 0.05 * number for number, each in enumerate(records, start=1))


def test_a_closed_loop_keeps_its_users_busy_and_asks_everything_once() -> None:
    client = SlowClient(0.01)
    requests = [planned(index) for index in range(23)]
    records = asyncio.run(closed_loop(client, requests, users=4))
    assert client.most == 4
    assert sorted(each.planned.index for each in records) == list(range(23))


def test_a_heartbeat_sees_a_client_that_is_held_up() -> None:
    client = SlowClient(0.0)
    client.in_flight = 5

    async def scenario() -> Heartbeat:
        async with heartbeat(client) as beat:
            await asyncio.sleep(0.05)
            time.sleep(0.1)
            await asyncio.sleep(0.05)
        return beat

    beat = asyncio.run(scenario())
    assert max(beat.delays) >= 0.05
    assert 0.0 < beat.in_flight <= 5 * beat.seconds
    assert beat.seconds >= 0.2
