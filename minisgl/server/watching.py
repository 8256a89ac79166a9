"""The endpoints for those who watch over the server: health and metrics."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from minisgl.core.sampling_params import SamplingParams
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.errors import ApiError
from minisgl.server.metrics import Metrics
from minisgl.server.openapi import ASKS, READS, errors
from minisgl.server.replies import HealthReply

_PROMPT = [0]
"""Any token will do."""


def watching_routes(engine: AsyncEngine, metrics: Metrics, health_timeout: float) -> APIRouter:
    """Health and metrics.

    Args:
        engine: to watch.
        metrics: to show.
        health_timeout: seconds that the engine has for one token.
    """
    router = APIRouter()

    @router.get("/health", response_model=HealthReply, responses=errors(503))
    async def health() -> Any:
        """Whether requests are taken."""
        if engine.error is not None:
            raise engine.error
        return {"status": "ok"}

    @router.get("/health/generate", response_model=HealthReply, responses=errors(*ASKS, 500))
    async def health_generate() -> Any:
        """Whether requests are answered: generates one token."""
        try:
            await asyncio.wait_for(_generate_one(engine), health_timeout)
        except TimeoutError as error:
            message = f"the engine has not generated a token within {health_timeout:g} s"
            raise ApiError(503, message, code="engine_slow") from error
        return {"status": "ok"}

    @router.get("/metrics", response_class=Response, responses={**_PLAIN_TEXT, **errors(*READS)})
    async def show_metrics() -> Response:
        """Counters, gauges and histograms in the format of Prometheus."""
        return Response(await metrics.text(), media_type=CONTENT_TYPE_LATEST)

    return router


_PLAIN_TEXT: dict[int | str, dict[str, Any]] = {200: {"content": {"text/plain": {"schema": {"type": "string"}}}}}


async def _generate_one(engine: AsyncEngine) -> None:
    answer = await engine.submit([_PROMPT], SamplingParams(max_tokens=1, temperature=0.0), streaming=False)
    try:
        async for _ in answer.updates():
            pass
    finally:
        answer.abort()
