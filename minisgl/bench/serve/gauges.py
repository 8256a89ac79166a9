"""What a server says of its inside at ``/metrics``, for servers that have it."""

from __future__ import annotations

import http.client
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

from minisgl.bench.serve.server import get

_NAMES = {
    ("minisgl_kv_pages", "used"): "used_pages",
    ("minisgl_kv_page_pool_size", None): "pages",
    ("minisgl_requests_running", None): "running",
    ("minisgl_requests_waiting", None): "waiting",
}


@dataclass(frozen=True, slots=True)
class Gauges:
    """Requests and pages of the engine at one moment.

    Args:
        running, waiting: requests.
        used_pages: KV pages that belong to running requests; what the prefix cache holds is not used.
        pages: of the pool.
    """

    running: int
    waiting: int
    used_pages: int
    pages: int

    @property
    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        return self.running == self.waiting == self.used_pages == 0


def read_gauges(host: str, port: int) -> Gauges | None:
    """What the server says now; None if it has no ``/metrics``, or other ones."""
    try:
        status, body = get(host, port, "/metrics")
    except (OSError, http.client.HTTPException):
        return None
    return parse_gauges(body.decode()) if status == 200 else None


def parse_gauges(text: str) -> Gauges | None:
    """The gauges out of Prometheus' text format, None if one is missing."""
    found: dict[str, int] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = _NAMES.get((sample.name, sample.labels.get("state")))
            if name is not None:
                found[name] = int(sample.value)
    return Gauges(**found) if len(found) == len(_NAMES) else None
