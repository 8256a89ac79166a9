"""What a router asks of a server that it sends requests to, beside ``/health``, ``/v1/models`` and ``/metrics``.

The paths and fields are those that SGLang and vLLM have, as far as `smg <https://github.com/lightseekorg/smg>`_ and
`vllm-router <https://github.com/vllm-project/router>`_ read them.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from importlib.metadata import version as package_version
from pathlib import Path
from typing import Any

from fastapi import APIRouter

from minisgl.server.async_engine import AsyncEngine
from minisgl.server.openapi import (
    ASKS,
    READS,
    FlushReply,
    LoadReply,
    LoadsReply,
    ModelInfoReply,
    ServerInfoReply,
    error_responses,
)


def worker_routes(engine: AsyncEngine) -> APIRouter:
    """``/v1/loads``, ``/get_load``, ``/server_info``, ``/model_info`` and their older names, and ``/flush_cache``."""
    router = APIRouter()
    config = engine.config
    path = engine.tokenizer.path
    checkpoint = _checkpoint(path)

    @router.get("/v1/loads", response_model=LoadsReply, responses=error_responses(*ASKS))
    async def loads() -> Any:
        """How busy the engine is, in SGLang's words; one rank, since ranks of ours share their requests."""
        stats = await engine.stats()
        load = {
            "dp_rank": 0,
            "num_running_reqs": stats.running,
            "num_waiting_reqs": stats.waiting,
            "num_total_reqs": stats.running + stats.waiting,
            "num_used_tokens": stats.used_pages * config.page_size,
            "max_total_num_tokens": stats.pages * config.page_size,
            "token_usage": stats.used_pages / stats.pages,
            "max_running_requests": config.max_running_requests,
        }
        return {"timestamp": datetime.now(UTC).isoformat(), "dp_rank_count": 1, "loads": [load]}

    @router.get("/get_load", response_model=LoadReply, responses=error_responses(*ASKS))
    async def get_load() -> Any:
        """Requests that run or wait."""
        stats = await engine.stats()
        return {"load": stats.running + stats.waiting}

    @router.get("/get_server_info", response_model=ServerInfoReply, responses=error_responses(*ASKS))
    @router.get("/server_info", response_model=ServerInfoReply, responses=error_responses(*ASKS))
    async def server_info() -> Any:
        """What this server can hold."""
        stats = await engine.stats()
        return {
            "model_path": config.model,
            "served_model_name": engine.model,
            "version": package_version("minisgl"),
            "tp_size": config.tensor_parallel_size,
            "dp_size": 1,
            "page_size": config.page_size,
            "context_length": engine.max_seq_len,
            "max_total_tokens": stats.pages * config.page_size,
            "max_running_requests": config.max_running_requests,
        }

    @router.get("/get_model_info", response_model=ModelInfoReply, responses=error_responses(*READS))
    @router.get("/model_info", response_model=ModelInfoReply, responses=error_responses(*READS))
    async def model_info() -> Any:
        """What model this is."""
        return {
            "model_path": config.model,
            "tokenizer_path": str(path),
            "is_generation": True,
            "model_type": checkpoint.get("model_type"),
            "architectures": checkpoint.get("architectures"),
        }

    @router.post("/flush_cache", response_model=FlushReply, responses=error_responses(*ASKS))
    async def flush_cache() -> Any:
        """Forget all cached prefixes but those that running requests use."""
        return {"flushed_pages": await engine.flush_cache()}

    return router


def _checkpoint(path: Path) -> dict[str, Any]:
    """``config.json`` of a checkpoint; empty if it has none, as one in GGUF need not."""
    try:
        return dict(json.loads((path / "config.json").read_bytes()))
    except (OSError, ValueError):
        return {}
