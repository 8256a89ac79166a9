"""When requests come, by their statistics."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.bench.serve.arrivals import constant, poisson, scaled
from minisgl.bench.serve.errors import LoadError


def test_poisson_arrivals_have_their_rate_and_no_memory() -> None:
    times = poisson(8.0, 20_000, np.random.default_rng(1))
    gaps = np.diff(times)
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.03)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.03)  # an exponential distribution's own
    assert np.quantile(gaps, 0.5) == pytest.approx(np.log(2) / 8, rel=0.03)
    assert abs(np.corrcoef(gaps[:-1], gaps[1:])[0, 1]) < 0.03
    in_each_second = np.bincount(times.astype(int))[:-1]
    assert in_each_second.var() == pytest.approx(in_each_second.mean(), rel=0.1)


def test_a_seed_gives_the_same_arrivals() -> None:
    first, again, other = (poisson(2.0, 50, np.random.default_rng(seed)).tolist() for seed in (3, 3, 4))
    assert first == again != other


def test_constant_arrivals_keep_their_distance() -> None:
    assert constant(4.0, 5).tolist() == [0.25, 0.5, 0.75, 1.0, 1.25]


def test_a_recording_keeps_its_bursts_at_another_rate() -> None:
    recorded = np.array([0.0, 0.0, 3.0, 4.0])
    assert scaled(recorded, 1.5).tolist() == [0.0, 0.0, 1.5, 2.0]  # three gaps in two seconds


def test_a_recording_of_one_moment_has_no_rate() -> None:
    with pytest.raises(LoadError, match=r"^rate: .* leave --rate out"):
        scaled(np.zeros(4), 1.0)
