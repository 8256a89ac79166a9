from __future__ import annotations

from minisgl.viz import loads
from minisgl.viz.svg import request_colors
from tests.viz.drawing import assert_sound, boxes, texts

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
