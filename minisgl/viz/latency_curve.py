"""What a server's users wait for at each load: latency against throughput, limits, goodput and the knee."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from minisgl.errors import ConfigError
from minisgl.viz.chart import Axis, chart
from minisgl.viz.svg import Picture, Point, stack

_TITLE = "Latency and throughput at each load"


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """A server under one load.

    Args:
        rate: requests offered a second.
        throughput: output tokens a second.
        ttft_p50, ttft_p95: time to the first token in seconds, median and 95th percentile.
        tpot_p50, tpot_p95: time per output token after the first in seconds, median and 95th percentile.
        goodput: requests a second that finished within the limits (DistServe, Zhong et al. 2024); None without limits.
    """

    rate: float
    throughput: float
    ttft_p50: float
    ttft_p95: float
    tpot_p50: float
    tpot_p95: float
    goodput: float | None = None

    def __post_init__(self) -> None:
        times = (self.ttft_p50, self.ttft_p95, self.tpot_p50, self.tpot_p95)
        if min(times) <= 0 or self.throughput < 0:
            raise ConfigError(f"times must be above 0 s, and the throughput at least 0: {self}")


def latency_curve(
    series: Mapping[str, Sequence[LoadPoint]], ttft_limit: float | None = None, tpot_limit: float | None = None
) -> Picture:
    """Two charts, one for the wait for the first token, one for each that follows: a line for each half and each
    95 % of the requests of a series. Marked are the load with the most goodput, and in the first chart the `knee`.

    Args:
        series: name, such as that of a policy → points, in any order, at least one.
        ttft_limit, tpot_limit: what users put up with, in seconds; None draws no line.
    """
    return stack(
        [
            _chart(series, ttft_limit, lambda point: (point.ttft_p50, point.ttft_p95), with_knee=True),
            _chart(series, tpot_limit, lambda point: (point.tpot_p50, point.tpot_p95), with_knee=False),
        ],
        ["Time to the first token", "Time per output token after the first"],
    )


def knee(points: Sequence[LoadPoint]) -> LoadPoint:
    """The load with the most throughput for its median wait: up to it throughput is worth its price, beyond it the
    queue only grows. The ratio is the power of a system (Kleinrock 1979).

    Args:
        points: at least one.
    """
    return max(points, key=lambda point: point.throughput / point.ttft_p50)


def _chart(
    series: Mapping[str, Sequence[LoadPoint]],
    limit: float | None,
    times: Callable[[LoadPoint], tuple[float, float]],
    with_knee: bool,
) -> Picture:
    """``times``: median and 95th percentile in seconds."""
    lines: dict[str, list[Point]] = {}
    marks: dict[str, Point] = {}
    for name, points in series.items():
        in_order = sorted(points, key=lambda point: point.rate)
        for index, which in enumerate(("median", "95th percentile")):
            lines[f"{name}, {which}"] = [(point.throughput, 1e3 * times(point)[index]) for point in in_order]
        if with_knee:
            bend = knee(points)
            marks[f"knee of {name}: {bend.rate:.3g} requests/s"] = bend.throughput, 1e3 * times(bend)[0]
        with_goodput = [(point.goodput, point) for point in points if point.goodput is not None]
        if with_goodput:
            goodput, best = max(with_goodput, key=lambda pair: pair[0])
            words = f"most goodput of {name}: {goodput:.3g} of {best.rate:.3g} requests/s within the limits"
            marks[words] = best.throughput, 1e3 * times(best)[1]
    limits = {} if limit is None else {"limit": 1e3 * limit}
    return chart(lines, marks, _TITLE, Axis("output tokens a second"), Axis("ms", log=True), limits, dots=True)
