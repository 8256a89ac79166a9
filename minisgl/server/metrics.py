"""``/metrics``: what an operator watches, in the format of Prometheus."""

from __future__ import annotations

import asyncio
import time

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from minisgl.errors import EngineDead
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.engine_stats import EngineStats
from minisgl.server.records import RequestRecord

SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
"""Upper ends of the histograms' buckets: 1 ms to 100 s, each 2 to 2.5 times the one before."""
STATS_TIMEOUT = 2.0
"""Seconds that a scrape waits for the engine, which answers between two steps."""
STATS_AGE = 0.25
"""Seconds for which an answer of the engine stands, however often it is asked for."""


class Metrics:
    """Counts requests, and asks the engine about its inside when it is scraped.

    Labels take few values: routes of this program, HTTP statuses, finish reasons, states of a page.

    Args:
        engine: to ask.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._asked = float("-inf")
        self._lock = asyncio.Lock()
        self._registry = registry = CollectorRegistry()

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"minisgl_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str, *labels: str) -> Gauge:
            return Gauge(f"minisgl_{name}", text, labels, registry=registry)

        def seconds(name: str, text: str) -> Histogram:
            return Histogram(f"minisgl_{name}_seconds", text, registry=registry, buckets=SECONDS)

        self._requests = counter("requests", "Requests that were answered.", "endpoint", "status")
        self._finished = counter("generations", "Generations that ended; n of a prompt are n.", "finish_reason")
        self._prompt = counter("prompt_tokens", "Tokens of prompts.")
        self._cached = counter(
            "cached_prompt_tokens", "Tokens of prompts that the prefix cache had; over prompt_tokens, its hit rate."
        )
        self._generated = counter("generation_tokens", "Tokens that were generated.")
        self._ttft = seconds("time_to_first_token", "From a request's arrival to its first token; streams only.")
        self._gap = seconds("inter_token_latency", "From one piece of a stream to the next, for each of its choices.")
        self._latency = seconds("request_latency", "From a request's arrival to the end of its answer; generations.")
        self._queue = seconds("queue_time", "From a request's arrival in the engine's queue to its first step.")
        self._up = gauge("engine_up", f"1 if the engine answered this scrape within {STATS_TIMEOUT:g} s, else 0.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._running = gauge("requests_running", "Requests in the engine's running batch.")
        self._pool = gauge("kv_page_pool_size", "KV pages in all.")
        self._pages = gauge("kv_pages", "KV pages by state; used ones belong to running requests.", "state")

    def observe_gap(self, gap: float) -> None:
        """Count the time between two pieces of one choice, in seconds."""
        self._gap.observe(gap)

    def observe(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        self._requests.labels(record.endpoint, str(record.status)).inc()
        if record.usage is None:
            return
        for reason in record.finish_reasons + ["abort"] * record.unfinished:
            self._finished.labels(reason).inc()
        self._prompt.inc(record.usage.prompt_tokens)
        self._cached.inc(record.usage.cached_tokens)
        self._generated.inc(record.usage.completion_tokens)
        self._latency.observe(time.perf_counter() - record.arrived)
        if record.finish_reasons:
            self._queue.observe(record.queue_time)
        if record.first_token is not None:
            self._ttft.observe(record.first_token - record.arrived)

    async def text(self) -> bytes:
        """Everything, with what the engine says now, or said a moment ago."""
        async with self._lock:
            if time.perf_counter() - self._asked > STATS_AGE:
                await self._ask()
        return generate_latest(self._registry)

    async def _ask(self) -> None:
        try:
            stats = await asyncio.wait_for(self._engine.stats(), STATS_TIMEOUT)
        except (TimeoutError, EngineDead):
            self._up.set(0)
            return
        self._show(stats)
        self._asked = time.perf_counter()

    def _show(self, stats: EngineStats) -> None:
        self._up.set(1)
        self._waiting.set(stats.waiting)
        self._running.set(stats.running)
        self._pool.set(stats.pages)
        for state, pages in (("used", stats.used_pages), ("cached", stats.cached_pages), ("free", stats.free_pages)):
            self._pages.labels(state).set(pages)
