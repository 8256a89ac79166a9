"""What can be asked about an engine, each thing under its topic."""

from __future__ import annotations

import msgspec

from minisgl.engine_core import EngineCore
from minisgl.server.engine_stage import Views
from minisgl.server.engine_stats import STATS, EngineStats
from minisgl.server.live.state import LIVE
from minisgl.server.live.view import LiveView


def views_of(core: EngineCore) -> Views:
    """All views of an engine, to be called between two steps. From now on a `LiveView` follows its steps."""
    live = LiveView(core)
    return {
        STATS: lambda: msgspec.msgpack.encode(_stats(core)),
        LIVE: lambda: msgspec.msgpack.encode(live.look()),
    }


def _stats(core: EngineCore) -> EngineStats:
    scheduler = core.scheduler
    memory = scheduler.memory
    free, cached = memory.pool.num_free, memory.cache.num_evictable
    return EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached)
