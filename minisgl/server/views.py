"""What can be asked about an engine, each thing under its topic."""

from __future__ import annotations

import msgspec

from minisgl.llm import LLM
from minisgl.server.engine_stage import Views
from minisgl.server.engine_stats import STATS, EngineStats
from minisgl.server.live.state import LIVE
from minisgl.server.live.view import LiveView


def views_of(llm: LLM) -> Views:
    """All views of ``llm``, to be called between two steps. From now on its steps pass a `LiveView`."""
    live = LiveView(llm)
    return {
        STATS: lambda: msgspec.msgpack.encode(_stats(llm)),
        LIVE: lambda: msgspec.msgpack.encode(live.look()),
    }


def _stats(llm: LLM) -> EngineStats:
    scheduler = llm.scheduler
    memory = scheduler.memory
    free, cached = memory.pool.num_free, memory.cache.num_evictable
    return EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached)
