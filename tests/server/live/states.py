"""A state without anything in it."""

from __future__ import annotations

from typing import Any

from minisgl.server.live.state import LiveState


def empty_state(time: float, cost: float = 0.0) -> LiveState:
    """Taken at a time, at a cost."""
    fields: dict[str, Any] = dict.fromkeys(LiveState.__struct_fields__, 0)
    lists: dict[str, Any] = {name: [] for name in ("cells", "nodes", "requests", "slices")}
    return LiveState(**{**fields, **lists, "cache": "none", "store": {}, "drafts": {}, "time": time, "cost": cost})
