"""What can be asked about an engine, each thing under its topic."""

from __future__ import annotations

import msgspec

from minisgl.llm import LLM
from minisgl.server.engine_stage import Views
from minisgl.server.engine_stats import STATS, EngineStats


def views_of(llm: LLM) -> Views:
    """All views of ``llm``, to be called between two steps."""
    return {STATS: lambda: msgspec.msgpack.encode(_stats(llm))}


def _stats(llm: LLM) -> EngineStats:
    scheduler = llm.scheduler
    memory = scheduler.memory
    free, cached = memory.pool.num_free, memory.cache.num_evictable
    return EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached)
