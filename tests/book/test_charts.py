from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree

import pytest

from minisgl.book import Axis, Picture, bars, chart, loads, memory_curve
from minisgl.book.svg import request_colors
from tests.book.drawing import SVG, assert_sound, boxes, texts

# -- chart and bars --------------------------------------------------------------------------------------------------


def lines_of(picture: Picture) -> list[list[tuple[float, float]]]:
    """Points of the lines, without the rules of the axes."""
    paths = [each for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path") if "line" in each.get("class", "")]
    numbers = [[float(number) for number in re.findall(r"[\d.]+", each.get("d", ""))] for each in paths]
    return [list(zip(each[::2], each[1::2], strict=True)) for each in numbers]


def dots_of(picture: Picture) -> list[tuple[float, float]]:
    """Middles of the filled circles."""
    paths = [each.get("d", "") for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path") if each.get("fill")]
    return [(float(x) + 3.5, float(y)) for x, y in re.findall(r"^M([\d.]+) ([\d.]+)a3.5", "\n".join(paths), re.M)]


def test_equal_factors_are_equal_steps_on_logarithmic_axes() -> None:
    picture = chart({"roof": [(1, 10), (10, 100), (100, 1000)]}, {}, "Roof", Axis("x", log=True), Axis("y", log=True))
    assert_sound(picture)
    (line,) = lines_of(picture)
    (left, low), (middle, mid), (right, high) = line
    assert middle - left == pytest.approx(right - middle, abs=0.2)
    assert low - mid == pytest.approx(mid - high, abs=0.2)
    assert low > high, "larger values are higher up"
    assert {"1", "10", "100", "1,000", "x", "y", "Roof", "roof"} <= set(texts(picture))


def test_equal_differences_are_equal_steps_on_linear_axes_which_begin_at_zero() -> None:
    picture = chart({"a": [(0, 0), (5, 20), (10, 40)], "b": [(0, 40), (10, 0)]}, {}, "Lines", Axis("s"), Axis("MB"))
    assert_sound(picture)
    a, b = lines_of(picture)
    assert a[1][0] == pytest.approx((a[0][0] + a[2][0]) / 2)
    assert a[1][1] == pytest.approx((a[0][1] + a[2][1]) / 2)
    assert a[0][1] == b[1][1]
    assert {"0", "10", "40"} <= set(texts(picture))
    dashes = [each.get("class", "") for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")]
    assert sum("viz-line" in each and "dashed" in each for each in dashes) == 1


def test_marks_are_numbered_after_the_lines_and_named_below() -> None:
    line = [(1.0, 1.0), (100.0, 100.0)]
    picture = chart({"roof": line}, {"here": (10.0, 10.0)}, "T", Axis("x", log=True), Axis("y", log=True))
    assert_sound(picture)
    numbers = boxes(picture)
    assert len(numbers) == 4, "the line and the mark, each in the drawing and in the legend"
    (start, end), middle = lines_of(picture)[0], numbers[2]
    assert float(middle.get("x", "")) + 11 == pytest.approx((start[0] + end[0]) / 2, abs=0.2)
    assert picture.text.splitlines()[1:] == ["1. roof: 1 → 1, 100 → 100.", "2. here: 10 → 10."]


def test_a_point_at_the_edge_stays_on_the_card() -> None:
    values = {"low": (1.0, 1.0), "high": (1000.0, 1000.0)}
    assert_sound(chart({}, values, "Edges", Axis("x", log=True), Axis("y", log=True)))


def test_what_was_measured_has_dots_in_the_colour_of_its_line() -> None:
    line, other = [(1.0, 10.0), (2.0, 30.0), (3.0, 20.0)], [(1.0, 12.0), (3.0, 21.0)]
    picture = chart({"a": line, "b": other}, {"best": (2.0, 30.0)}, "T", Axis("x"), Axis("y"), dots=True)
    assert_sound(picture)
    drawn = [place for each in lines_of(picture)[:2] for place in each]
    assert dots_of(picture) == [pytest.approx(place, abs=0.1) for place in drawn]
    paths = [each.attrib for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")]
    strokes = [each["style"].removeprefix("stroke:") for each in paths if "style" in each]
    assert strokes == list(dict.fromkeys(each["fill"] for each in paths if "fill" in each))


def test_numbers_of_lines_and_marks_do_not_cover_each_other() -> None:
    lines = {str(number): [(1.0, 1.0), (10.0, 10.0 + number / 10)] for number in range(4)}
    marks = {f"mark {number}": (5.0, 5.0 + number / 10) for number in range(4)}
    picture = chart(lines, marks, "T", Axis("x"), Axis("y"), dots=True)
    assert_sound(picture)
    places = [(float(box.get("x", "")), float(box.get("y", ""))) for box in boxes(picture)]
    numbers = [place for place in places if place[0] != 14]
    assert len(numbers) == 8
    for (x, y), (other_x, other_y) in combinations(numbers, 2):
        assert abs(x - other_x) >= 22 or abs(y - other_y) >= 19


def test_a_limit_is_a_line_across_with_its_name() -> None:
    line = [(0.0, 10.0), (10.0, 20.0)]
    picture = chart({"a": line}, {}, "T", Axis("x"), Axis("y"), limits={"most": 40.0})
    assert_sound(picture)
    paths = [each.attrib for each in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")]
    limit, drawn = (each["d"] for each in paths if "line" in each["class"])
    height = float(limit.removeprefix("M76 ").removesuffix("H722"))
    middle = float(drawn.rpartition(" ")[2])
    assert 300 - height == pytest.approx(2 * (300 - middle)), "twice as high as 20, and on the chart"
    assert "most: 40" in texts(picture)
    assert "most: 40." in picture.text


def test_of_a_long_line_the_first_the_highest_and_the_last_point_are_told() -> None:
    points = [(float(x), float(-abs(x - 60) + 60)) for x in range(101)]
    assert "1. a: 0 → 0, 60 → 60, 100 → 20." in chart({"a": points}, {}, "T", Axis("x"), Axis("y")).text


def test_a_curve_of_memory_says_its_highest_point() -> None:
    picture = memory_curve({"a": [(0.0, 0.0), (0.5, 900.0), (1.0, 400.0)], "b": [(0.0, 0.0), (0.5, 100.0)]}, "Memory")
    assert_sound(picture)
    assert {"Memory", "a: at most 900 MB", "b: at most 100 MB", "seconds", "MB", "800", "0.2"} <= set(texts(picture))
    (start, top, end) = lines_of(picture)[0]
    assert top[1] < end[1] < start[1]


def test_bars_are_as_long_as_their_parts_together() -> None:
    picture = bars({"one": {"read": 30.0, "write": 10.0}, "other": {"write": 20.0}}, "Time", "ms")
    assert_sound(picture)
    read, write, other = (float(box.get("width", "")) + 1 for box in boxes(picture)[:3])
    assert read == pytest.approx(3 * write, rel=0.01)
    assert other == pytest.approx(2 * write, rel=0.01)
    assert {"40 ms", "20 ms", "one", "other", "read", "write"} <= set(texts(picture))
    fills = [box.get("fill") for box in boxes(picture)[:3]]
    assert fills[1] == fills[2] != fills[0], "a part has one colour in all bars"
    assert picture.text.splitlines()[1:] == ["one: 40, of which read 30, write 10.", "other: 20, of which write 20."]


@pytest.mark.parametrize("unit", ["ms", "thousand", "tokens a second"])
def test_a_bar_leaves_room_for_its_size(unit: str) -> None:
    picture = bars({"long": {"read": 529.0}}, "Time", unit)
    assert_sound(picture)
    (bar,) = (float(box.get("x", "")) + float(box.get("width", "")) for box in boxes(picture)[:1])
    assert bar + 6 + 7.5 * len(f"529 {unit}") < 760 - 6


def test_a_piece_too_narrow_for_its_number_is_drawn_without() -> None:
    picture = bars({"x": {"much": 1000.0, "little": 3.0}}, "Time", "s")
    assert_sound(picture)
    assert texts(picture).count("2") == 1, "in the legend alone"


# -- loads -----------------------------------------------------------------------------------------------------------

SCHEDULES = {"by row": [{0: 6}, {1: 2}, {}], "evenly": [{0: 3}, {0: 3}, {1: 2}]}


def test_every_piece_is_as_long_as_its_work_and_says_whose_it_is() -> None:
    picture = loads(SCHEDULES, "Who does what", "tile")
    assert_sound(picture)
    widths = [float(box.get("width", "")) + 1 for box in boxes(picture)]
    unit = widths[0] / 6
    assert [round(width / unit, 3) for width in widths] == [6, 2, 3, 3, 2]
    assert [box.get("fill") for box in boxes(picture)] == [request_colors(row)[0] for row in (0, 1, 0, 0, 1)]
    assert [text for text in texts(picture) if text.isdigit()] == ["0", "1", "0", "0", "1"]


def test_it_says_when_all_are_done() -> None:
    said = repr(loads(SCHEDULES, "Who does what", "tile")).splitlines()
    assert "by row: done after 6 tiles." in said
    assert "evenly: done after 3 tiles." in said
    assert said.count("Processor 2: nothing.") == 1
    assert "Processor 2: 2 tiles of row 1." in said


def test_pieces_without_room_have_no_number() -> None:
    picture = loads({"all": [{row: 1 for row in range(80)}]}, "Many", "key")
    assert_sound(picture)
    assert not [text for text in texts(picture) if text.isdigit()]
