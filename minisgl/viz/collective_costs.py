"""What a collective costs by the size of its message, method by method, and from which size on another is faster."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from minisgl.errors import ConfigError
from minisgl.viz.chart import Axis, chart
from minisgl.viz.svg import Picture
from minisgl.viz.units import byte_size

Cost = tuple[str, int, float]
"""(method, bytes of the message, microseconds)."""

Piece = tuple[float, float]
"""A straight line: its heights at both ends."""

Crossing = tuple[str, str, float, float]
"""(the lower one before, the lower one after, share of the way from left to right, height)."""


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Where two methods take the same time.

    Args:
        below: the fastest for smaller messages.
        above: the fastest for larger ones.
        nbytes: of the message.
        microseconds: that both take.
    """

    below: str
    above: str
    nbytes: float
    microseconds: float


def collective_costs(costs: Sequence[Cost], title: str) -> Picture:
    """A line for each method on logarithmic axes, and a mark where another method becomes the fastest.

    Args:
        costs: in any order, at least one.
        title: which collective, between which devices.

    Raises:
        ConfigError: a size or a time is not positive, or there are two times for one method and size; names it.
    """
    lines = {
        method: [(nbytes / 1024, microseconds) for nbytes, microseconds in sorted(times.items())]
        for method, times in _by_method(costs).items()
    }
    marks = {
        f"from {byte_size(round(each.nbytes))} on: {each.above}, no longer {each.below}": (
            each.nbytes / 1024,
            each.microseconds,
        )
        for each in break_evens(costs)
    }
    return chart(lines, marks, title, Axis("KiB of the message", log=True), Axis("µs", log=True), dots=True)


def break_evens(costs: Sequence[Cost]) -> list[BreakEven]:
    """Where the fastest method changes, in order of size.

    Between two measured sizes a method is taken to be a straight line on logarithmic axes. Where one of two methods was
    not measured on both sides, nothing is claimed.

    Args, Raises: see `collective_costs`.
    """
    methods = _by_method(costs)
    sizes = sorted({nbytes for times in methods.values() for nbytes in times})
    found: list[BreakEven] = []
    fastest = ""
    for left, right in pairwise(sizes):
        pieces = {
            method: (_logarithm(times, left), _logarithm(times, right))
            for method, times in methods.items()
            if min(times) <= left and right <= max(times)
        }
        if pieces:
            crossings, fastest = _envelope(pieces, fastest)
            for below, above, share, height in crossings:
                nbytes = math.exp(math.log(left) + share * math.log(right / left))
                found.append(BreakEven(below, above, nbytes, math.exp(height)))
    return found


def _by_method(costs: Sequence[Cost]) -> dict[str, dict[int, float]]:
    """Method → bytes → microseconds."""
    methods: dict[str, dict[int, float]] = {}
    for method, nbytes, microseconds in costs:
        times = methods.setdefault(method, {})
        if nbytes <= 0 or microseconds <= 0 or nbytes in times:
            raise ConfigError(
                f"costs of {method!r}: {nbytes} bytes in {microseconds} µs; both must be above 0, each size there once"
            )
        times[nbytes] = microseconds
    return methods


def _logarithm(times: Mapping[int, float], nbytes: int) -> float:
    """Of the time for a size between two measured ones, on the straight line between them on logarithmic axes."""
    below = max(size for size in times if size <= nbytes)
    above = min(size for size in times if size >= nbytes)
    low, high = math.log(times[below]), math.log(times[above])
    return low if below == above else low + (high - low) * math.log(nbytes / below) / math.log(above / below)


def _envelope(pieces: Mapping[str, Piece], before: str) -> tuple[list[Crossing], str]:
    """Who is the lowest from left to right: the crossings, and who it is at the right end.

    Args:
        pieces: straight lines by name.
        before: the lowest so far; it stays, where it is as low as any other.
    """
    now = min(pieces, key=lambda name: (pieces[name][0], name != before))
    found: list[Crossing] = []
    while True:
        left, right = pieces[now]
        lower = {name: piece for name, piece in pieces.items() if piece[1] < right}
        if not lower:
            return found, now
        shares = {name: (piece[0] - left) / ((right - left) - (piece[1] - piece[0])) for name, piece in lower.items()}
        following = min(shares, key=lambda name: (shares[name], lower[name][1]))
        found.append((now, following, shares[following], left + shares[following] * (right - left)))
        now = following
