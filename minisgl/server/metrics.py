"""Monitoring: health checks, Prometheus metrics, and a record of each HTTP request."""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from dataclasses import dataclass, field
from importlib.metadata import version as package_version
from itertools import accumulate
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString
from starlette.requests import Request
from starlette.types import Scope

from minisgl.errors import EngineDead
from minisgl.sampling_params import SamplingParams
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.errors import ApiError
from minisgl.server.formats import Usage
from minisgl.server.messages import Update
from minisgl.server.openapi import ASKS, READS, HealthReply, VersionReply, error_responses

_KEY = "minisgl.record"


@dataclass(slots=True)
class HttpRecord:
    """One HTTP request, from its arrival to the last byte of its answer. Times are seconds of ``time.perf_counter``."""

    request_id: str  # sent back as x-request-id
    arrived: float = field(default_factory=time.perf_counter)
    endpoint: str = "other"  # the route's path with its placeholders, so that there are few
    status: int = 499  # stays 499 if the client left before the answer
    code: str | None = None  # of the error, if any
    streamed: bool = False
    usage: Usage | None = None  # set once the engine has accepted it
    choices: int = 0
    finish_reasons: list[str] = field(default_factory=list)  # of the choices that have ended
    queue_time: float = 0.0  # longest of its choices, in seconds
    first_token: float | None = None  # when it arrived, if streamed
    _last_piece: dict[int, float] = field(default_factory=dict)

    def note(self, update: Update) -> float | None:
        """Record an update for the client; returns the seconds since the piece before of this choice, if streamed."""
        if update.finish_reason is not None:
            self.finish_reasons.append(update.finish_reason)
            self.queue_time = max(self.queue_time, update.queue_time)
        if not self.streamed or not update.token_ids:
            return None
        now = time.perf_counter()
        before = self._last_piece.get(update.choice)
        self._last_piece[update.choice] = now
        if self.first_token is None:
            self.first_token = now
        return None if before is None else now - before

    @property
    def unfinished(self) -> int:
        """Choices that have not ended."""
        return self.choices - len(self.finish_reasons)

    def attach(self, scope: Scope) -> None:
        """Store the record where `record_of` finds it."""
        scope[_KEY] = self


def record_of(request: Request) -> HttpRecord:
    """The record of a request."""
    record: HttpRecord = request.scope[_KEY]
    return record


# Upper ends of the histograms' buckets: 1 ms to 100 s, each 2 to 2.5 times the one before
SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
STATS_TIMEOUT = 2.0  # seconds that a scrape waits for the engine, which answers between two steps
STATS_AGE = 0.25  # seconds for which the engine's last answer is used again


class TokenGaps(Collector):
    """A histogram that is observed once a token, by the event loop alone: it takes no lock."""

    def __init__(self) -> None:
        self._counts = [0] * (len(SECONDS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        """Count one gap."""
        self._counts[bisect_left(SECONDS, seconds)] += 1
        self._sum += seconds

    def collect(self) -> list[HistogramMetricFamily]:
        """The histogram as Prometheus wants it: each bucket counts those below it too."""
        text = "From one piece of a stream to the next, for each of its choices."
        ends = [*map(floatToGoString, SECONDS), "+Inf"]
        buckets = list(zip(ends, map(float, accumulate(self._counts)), strict=True))
        return [HistogramMetricFamily("minisgl_inter_token_latency_seconds", text, buckets, self._sum)]


class ServerMetrics:
    """Prometheus metrics: counts requests, and asks the engine for its state when scraped. Labels have few values."""

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
        self._gap = TokenGaps()
        registry.register(self._gap)
        self._latency = seconds("request_latency", "From a request's arrival to the end of its answer; generations.")
        self._queue = seconds("queue_time", "From a request's arrival in the engine's queue to its first step.")
        self._up = gauge("engine_up", f"1 if the engine answered this scrape within {STATS_TIMEOUT:g} s, else 0.")
        self._waiting = gauge("requests_waiting", "Requests in the engine's queue.")
        self._running = gauge("requests_running", "Requests in the engine's running batch.")
        self._pool = gauge("kv_page_pool_size", "KV pages in all.")
        self._drafted = gauge("draft_tokens", "Tokens that were guessed and verified since the engine started.")
        self._accepted = gauge("accepted_draft_tokens", "Of those, tokens that became output.")
        self._mean_accepted = gauge("mean_accepted_length", "Accepted tokens of a verification, which is one row's.")
        self._paused = gauge("requests_drafting_paused", "Running requests without drafts, which did not pay.")
        self._pages = gauge("kv_pages", "KV pages by state; used ones belong to running requests.", "state")
        # The same by the names that routers read of vLLM
        self._gauges_of_vllm = {
            name: Gauge(f"vllm:{name}", text, ["model_name"], registry=registry)
            for name, text in (
                ("num_requests_running", "As minisgl_requests_running."),
                ("num_requests_waiting", "As minisgl_requests_waiting."),
                ("kv_cache_usage_perc", "Share of the KV pages that running requests use, from 0 to 1."),
            )
        }
        self._store = counter(
            "page_store_pages",
            "KV pages, if there is a page store: evicted into it, wanted by prompts and not in the prefix cache, and "
            "restored from the store; restored over wanted is its hit rate.",
            "event",
        )
        self._stored: dict[str, int] = {}  # what the engine said last

    def observe_gap(self, gap: float) -> None:
        """Count the time between two pieces of one choice, in seconds."""
        self._gap.observe(gap)

    def observe(self, record: HttpRecord) -> None:
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
        """All metrics in the format of Prometheus; the engine's are at most `STATS_AGE` old."""
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
        self._asked = time.perf_counter()
        self._up.set(1)
        self._waiting.set(stats.waiting)
        self._running.set(stats.running)
        self._pool.set(stats.pages)
        self._drafted.set(stats.drafted)
        self._accepted.set(stats.accepted)
        self._mean_accepted.set(stats.accepted / max(stats.verifications, 1))
        self._paused.set(stats.paused)
        for state, pages in (("used", stats.used_pages), ("cached", stats.cached_pages), ("free", stats.free_pages)):
            self._pages.labels(state).set(pages)
        of_vllm = (stats.running, stats.waiting, stats.used_pages / stats.pages)
        for each, value in zip(self._gauges_of_vllm.values(), of_vllm, strict=True):
            each.labels(self._engine.model).set(value)
        for event, count in stats.store.items():
            new = count - self._stored.get(event, 0)
            self._store.labels(event).inc(new if new >= 0 else count)  # an engine that was restarted begins anew
        self._stored = stats.store


_PLAIN_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


def monitoring_routes(engine: AsyncEngine, metrics: ServerMetrics, health_timeout: float) -> APIRouter:
    """``/health``, ``/ping``, ``/health/generate`` (up to ``health_timeout`` s), ``/version`` and ``/metrics``."""
    router = APIRouter()

    @router.get("/version", response_model=VersionReply, responses=error_responses(*READS))
    async def version() -> Any:
        """Version of this server."""
        return {"version": package_version("minisgl")}

    @router.get("/ping", response_model=HealthReply, responses=error_responses(503))
    @router.get("/health", response_model=HealthReply, responses=error_responses(503))
    async def health() -> Any:
        """Whether requests are taken."""
        if engine.error is not None:
            raise engine.error
        return {"status": "ok"}

    @router.get("/health/generate", response_model=HealthReply, responses=error_responses(*ASKS, 500))
    async def health_generate() -> Any:
        """Whether requests are answered: generates one token."""
        try:
            await asyncio.wait_for(_generate_one(engine), health_timeout)
        except TimeoutError as error:
            message = f"the engine has not generated a token within {health_timeout:g} s"
            raise ApiError(503, message, code="engine_slow") from error
        return {"status": "ok"}

    @router.get("/metrics", response_class=Response, responses={**_PLAIN_TEXT, **error_responses(*READS)})
    async def show_metrics() -> Response:
        """Counters, gauges and histograms in the format of Prometheus."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


async def _generate_one(engine: AsyncEngine) -> None:
    answer = await engine.submit([[0]], SamplingParams(max_tokens=1, temperature=0.0), streaming=False)
    try:
        async for _ in answer.updates():
            pass
    finally:
        answer.abort()
