"""When requests arrive in an open loop, where nobody waits for answers."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from minisgl.bench.serve.errors import LoadError

Times = NDArray[np.float64]
"""Seconds since the beginning, never decreasing."""


def poisson(rate: float, count: int, rng: np.random.Generator) -> Times:
    """Arrivals of many independent users: gaps are exponentially distributed.

    Args:
        rate: requests a second, on average.
        count: how many.
        rng: of the gaps.
    """
    return np.cumsum(rng.exponential(1.0 / rate, size=count))


def constant(rate: float, count: int) -> Times:
    """Arrivals by the clock: all gaps are the same."""
    return np.arange(1, count + 1) / rate


def scaled(times: Times, rate: float) -> Times:
    """Recorded arrivals, the first at 0, sped up or slowed down until their mean rate is ``rate``. Bursts stay bursts.

    Raises:
        LoadError: they all come at the same time, so that no factor gives a rate.
    """
    duration = float(times[-1])
    if duration == 0.0:
        raise LoadError("rate: all requests of the trace arrive at once, which no factor changes; leave --rate out")
    return times * ((len(times) - 1) / duration / rate)
