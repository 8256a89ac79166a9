"""The plan of the cascade backend as a picture."""

from __future__ import annotations

import numpy as np

from minisgl.attention.shared_prefix import PrefixGroups, find_groups
from minisgl.core.request import Int32Array
from minisgl.viz import prefix_groups
from tests.viz.drawing import assert_sound, boxes, texts

PAGES = np.array([[1, 2, 3, 0], [7, 0, 0, 0], [1, 2, 4, 5], [1, 2, 6, 0]], dtype=np.int32)
LENS = np.array([11, 3, 15, 10], dtype=np.int32)
UIDS = [4, 9, 2, 7]


def groups_of(seq_lens: Int32Array, min_rows: int = 2) -> PrefixGroups:
    return find_groups(PAGES, (seq_lens - 1) // 4, page_size=4, min_rows=min_rows, min_pages=1)


def test_a_prefix_is_one_box_beside_all_of_its_rows() -> None:
    picture = prefix_groups(groups_of(LENS), LENS, UIDS)
    assert_sound(picture)
    assert texts(picture)[0] == "4 rows with 39 keys, of which 23 are read"
    shared, *own = boxes(picture)
    assert shared.get("class") == "viz-shared"
    assert [float(box.get("height", "")) for box in (shared, *own)] == [63, 19, 19, 19, 19]
    assert texts(picture)[2:] == ["8", "r4", "3", "r2", "7", "r7", "2", "r9", "3"]
    ends = [float(box.get("x", "")) + float(box.get("width", "")) for box in own]
    assert max(ends) == ends[1]  # the longest row ends last
    assert "r4 + r2 + r7: 8 keys read once.\nr4: 3 keys of its own." in repr(picture)


def test_without_groups_every_row_is_read_alone() -> None:
    picture = prefix_groups(groups_of(LENS, min_rows=4), LENS, UIDS)
    assert texts(picture)[0] == "4 rows with 39 keys, of which 39 are read"
    assert [box.get("class") for box in boxes(picture)] == [None] * 4


def test_pictures_of_a_player_have_one_scale_and_one_height() -> None:
    few = LENS[:1]
    alone = find_groups(PAGES[:1], (few - 1) // 4, page_size=4, min_rows=2, min_pages=1)
    picture = prefix_groups(alone, few, UIDS[:1], most_rows=4, most_keys=15)
    beside = prefix_groups(groups_of(LENS), LENS, UIDS)
    assert_sound(picture)
    assert picture.height == beside.height
    (row,), (shared, own, *_) = boxes(picture), boxes(beside)
    whole = float(own.get("x", "")) + float(own.get("width", "")) - float(shared.get("x", ""))
    assert abs(float(row.get("width", "")) - whole) < 0.01
