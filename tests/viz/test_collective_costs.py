from __future__ import annotations

import math

import pytest

from minisgl.errors import ConfigError
from minisgl.viz import break_evens, collective_costs
from tests.viz.drawing import assert_sound, texts
from tests.viz.test_chart_and_bars import dots_of

KIB = 1024
ONE_SHOT = [("one-shot", KIB * size, float(size)) for size in (1, 10, 100)]
TWO_SHOT = [("two-shot", KIB * size, 10.0) for size in (1, 100)]
NCCL = [("NCCL", KIB * size, 20.0) for size in (1, 1000)]


def test_break_even_is_where_the_lines_cross_on_logarithmic_axes() -> None:
    costs = [("a", 100, 1.0), ("a", 10_000, 100.0), ("b", 100, 10.0), ("b", 10_000, 10.0)]
    (found,) = break_evens(costs)
    assert (found.below, found.above) == ("a", "b")
    assert found.nbytes == pytest.approx(1000)
    assert found.microseconds == pytest.approx(10)


def test_only_the_fastest_count() -> None:
    assert [(each.below, each.above) for each in break_evens([*ONE_SHOT, *TWO_SHOT, *NCCL])] == [
        ("one-shot", "two-shot")
    ]


def test_several_between_two_measured_sizes_come_in_order() -> None:
    costs = [
        ("a", 1, 1.0),
        ("a", 10**6, 10.0**6),
        ("b", 1, 10.0),
        ("b", 10**6, 10.0**3),
        ("c", 1, 80.0),
        ("c", 10**6, 80.0),
    ]
    found = break_evens(costs)
    assert [(each.below, each.above) for each in found] == [("a", "b"), ("b", "c")]
    assert found[0].nbytes == pytest.approx(10**1.5)
    assert found[1].microseconds == pytest.approx(80)


def test_a_crossing_at_a_measured_size_counts_once() -> None:
    costs = [("a", 1, 1.0), ("a", 10, 10.0), ("a", 100, 100.0), ("b", 1, 10.0), ("b", 10, 10.0), ("b", 100, 10.0)]
    (found,) = break_evens(costs)
    assert found.nbytes == pytest.approx(10)


def test_sizes_that_only_another_method_was_measured_at_lie_on_a_straight_line() -> None:
    (found,) = break_evens([("a", 1, 1.0), ("a", 10**4, 100.0), ("b", 1, 20.0), ("b", 100, 5.0), ("b", 10**4, 5.0)])
    assert found.nbytes == pytest.approx(100 ** (math.log(20) / math.log(40)))


def test_nothing_is_claimed_where_a_method_was_not_measured() -> None:
    assert break_evens([*ONE_SHOT, ("other", 50 * KIB, 1.0), ("other", 1000 * KIB, 1.0)]) == []
    assert break_evens(ONE_SHOT[:1]) == []


def test_a_line_with_dots_for_each_method_and_a_mark_for_each_break_even() -> None:
    costs = [*ONE_SHOT, *TWO_SHOT, *NCCL]
    picture = collective_costs(costs, "All-reduce <4>")
    assert_sound(picture)
    assert len(dots_of(picture)) == len(costs)
    found = texts(picture)
    assert {"All-reduce <4>", "one-shot", "two-shot", "NCCL", "µs", "KiB of the message"} <= set(found)
    assert "from 10.00 KiB on: two-shot, no longer one-shot" in found
    assert "1. one-shot: 1 → 1, 10 → 10, 100 → 100." in picture.text
    assert collective_costs(costs[::-1], "t").text.splitlines()[3] == "3. one-shot: 1 → 1, 10 → 10, 100 → 100."


def test_hundreds_of_megabytes_stay_on_the_card() -> None:
    assert_sound(collective_costs([("NCCL", 10, 1.0), ("NCCL", 800 * 2**20, 10.0**5)], "All-reduce"))


@pytest.mark.parametrize("bad", [("a", 0, 1.0), ("a", 8, 0.0), ("one-shot", KIB, 3.0)])
def test_bad_rows(bad: tuple[str, int, float]) -> None:
    with pytest.raises(ConfigError, match=f"costs of '{bad[0]}': {bad[1]} bytes"):
        collective_costs([*ONE_SHOT, bad], "t")
