from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from minisgl.errors import ConfigError
from minisgl.viz import LoadPoint, knee, latency_curve
from tests.viz.drawing import assert_sound, texts
from tests.viz.test_chart_and_bars import dots_of, lines_of

CURVE = [
    LoadPoint(1.0, 100.0, 0.040, 0.060, 0.010, 0.012, 1.0),
    LoadPoint(2.0, 200.0, 0.050, 0.080, 0.011, 0.014, 2.0),
    LoadPoint(4.0, 400.0, 0.070, 0.200, 0.014, 0.020, 3.9),
    LoadPoint(8.0, 500.0, 2.000, 5.000, 0.020, 0.050, 0.5),
]


def test_two_charts_with_a_line_for_each_percentile() -> None:
    picture = latency_curve({"fcfs": CURVE})
    assert_sound(picture)
    found = texts(picture)
    assert found.count("fcfs, median") == found.count("fcfs, 95th percentile") == 2
    assert {"Time to the first token", "Time per output token after the first", "output tokens a second"} <= set(found)
    assert "1. fcfs, median: 100 → 40, 200 → 50, 400 → 70, 500 → 2,000." in picture.text
    assert "2. fcfs, 95th percentile: 100 → 12, 200 → 14, 400 → 20, 500 → 50." in picture.text


def test_more_throughput_is_further_right_and_a_longer_wait_higher_up() -> None:
    lines = [line for line in lines_of(latency_curve({"fcfs": CURVE[::-1]})) if len(line) == 4]
    assert len(lines) == 4
    for line in lines:
        assert all(a[0] < b[0] and a[1] > b[1] for a, b in pairwise(line))
    assert len(dots_of(latency_curve({"fcfs": CURVE}))) == 16


def test_limits_goodput_and_knee_are_marked() -> None:
    slower = [
        replace(point, ttft_p50=2 * point.ttft_p50, goodput=point.goodput / 2) for point in CURVE if point.goodput
    ]
    picture = latency_curve({"fcfs": CURVE, "lpm <b>": slower}, ttft_limit=0.5, tpot_limit=0.03)
    assert_sound(picture)
    found = texts(picture)
    assert {"limit: 500", "limit: 30", "knee of fcfs: 4 requests/s", "knee of lpm <b>: 4 requests/s"} <= set(found)
    assert found.count("most goodput of fcfs: 3.9 of 4 requests/s within the limits") == 2
    assert found.count("most goodput of lpm <b>: 1.95 of 4 requests/s within the limits") == 2
    assert "most goodput of fcfs: 3.9 of 4 requests/s within the limits: 400 → 200." in picture.text


def test_the_knee_has_the_most_throughput_for_its_wait() -> None:
    assert knee(CURVE) == CURVE[2]
    assert knee(CURVE[3:]) == CURVE[3]


def test_without_limits_there_is_no_goodput() -> None:
    picture = latency_curve({"fcfs": [replace(point, goodput=None) for point in CURVE]})
    assert "goodput" not in picture.text
    assert "limit" not in picture.text
    assert_sound(latency_curve({"one": CURVE[:1]}))


@pytest.mark.parametrize("change", [{"tpot_p50": 0.0}, {"ttft_p95": -1.0}, {"throughput": -1.0}])
def test_times_that_cannot_be(change: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="above 0 s"):
        replace(CURVE[0], **change)
