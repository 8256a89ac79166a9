from __future__ import annotations

import pytest

from minisgl.viz import kernel_timeline
from minisgl.viz.svg import WIDTH
from tests.viz.drawing import assert_sound, boxes, texts

IN_TURN = [("norm", 0.0, 2.0), ("linear", 3.0, 8.0), ("norm", 9.0, 10.0)]
EARLY = [("norm", 0.0, 2.5), ("linear", 1.0, 6.0), ("merge", 2.5, 7.0)]


def test_each_kernel_is_a_box_where_and_as_long_as_it_ran() -> None:
    picture = kernel_timeline({"in turn": IN_TURN, "early": EARLY}, "One layer")
    scale = (WIDTH - 28) / 10
    drawn = boxes(picture)[:6]
    expected = [(14 + start * scale, (end - start) * scale - 1) for _, start, end in IN_TURN + EARLY]
    assert [float(box.get("x", "")) for box in drawn] == pytest.approx([x for x, _ in expected], rel=1e-3)
    assert [float(box.get("width", "")) for box in drawn] == pytest.approx([width for _, width in expected], rel=1e-3)
    fills = [box.get("fill") for box in boxes(picture)]
    assert fills[0] == fills[2] == fills[3] != fills[1]
    assert "early: norm from 0.0 to 2.5, linear from 1.0 to 6.0, merge from 2.5 to 7.0." in picture.text
    assert {"in turn", "10.0 µs", "7.0 µs", "merge"} <= set(texts(picture))
    assert_sound(picture)


def test_only_what_runs_at_the_same_time_is_in_another_lane() -> None:
    heights = [float(box.get("y", "")) for box in boxes(kernel_timeline({"a": IN_TURN, "b": EARLY}, ""))[:6]]
    assert heights[0] == heights[1] == heights[2]
    assert heights[3] == heights[5] < heights[4]


def test_many_short_kernels_stay_on_the_card() -> None:
    spans = [(f"kernel_{index % 21}", index / 10, index / 10 + 0.01) for index in range(300)]
    assert_sound(kernel_timeline({"many": spans}, "All of a step"))
    assert_sound(kernel_timeline({"nothing": []}, "Nothing"))
