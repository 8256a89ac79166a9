from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from minisgl.batch import Batch, build_batch
from minisgl.book import Lengths, Picture, attention_mask, batch_arrays, length_strip
from minisgl.book.svg import WIDTH
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.table import RunningTable
from tests.book.drawing import SVG, assert_sound, boxes, texts

# -- batch pictures --------------------------------------------------------------------------------------------------


def make(slots: list[int], q_lens: list[int], kv_lens: list[int], samples: list[int], page_size: int = 4) -> Batch:
    """A step over a page table in random order."""
    pages = max(q + kv for q, kv in zip(q_lens, kv_lens, strict=True)) // page_size + 1
    size = (max(slots) + 1) * pages
    arrays = [np.array(each, dtype=np.int32) for each in (slots, q_lens, kv_lens)]
    page_table = np.random.default_rng(0).permutation(size).astype(np.int32).reshape(-1, pages)
    sample_rows = np.array(samples, dtype=np.int32)
    return build_batch(*arrays, page_table, page_size, sample_rows, np.zeros_like(sample_rows), q_lens.count(1))


@pytest.fixture
def mixed() -> Batch:
    """Two decode rows, a prefill and a chunk that is not the last."""
    return make([2, 0, 5, 1], [1, 1, 5, 7], [9, 3, 0, 8], [0, 1, 2])


@pytest.fixture
def large() -> Batch:
    return make(list(range(40)), [1] * 30 + [200] * 10, [50] * 30 + [3000] * 10, list(range(35)), 16)


def columns(picture: Picture, batch: Batch) -> list[list[str]]:
    """What stands below each flat token: index, position, slot, place."""
    found = texts(picture)
    first = found.index("out_locs") + 1
    numbers = found[first : found.index("slots")]
    groups: list[list[str]] = []
    for row in range(batch.num_rows):
        fed = int(batch.q_lens[row])
        heads = 2 + (row == batch.num_rows - 1)  # the row's number, where it starts, and where the last one ends
        body, numbers = numbers[: heads + 4 * fed], numbers[heads + 4 * fed :]
        assert body[:heads] == [str(row), *map(str, batch.cu_seqlens_q[row : row + heads - 1])]
        groups += [body[start : start + 4] for start in range(heads, len(body), 4)]
    assert numbers == ["row"]
    return groups


def test_every_array_stands_under_its_token(mixed: Batch) -> None:
    picture = batch_arrays(mixed)
    arrays = (np.arange(mixed.num_tokens), mixed.positions, mixed.token_slots, mixed.out_locs)
    assert columns(picture, mixed) == [[str(array[token]) for array in arrays] for token in range(14)]
    assert_sound(picture)


def test_a_line_for_each_row(mixed: Batch) -> None:
    picture = batch_arrays(mixed)
    found = texts(picture)
    body = found[found.index("in sample_rows") + 1 :]
    assert [body[start : start + 6] for start in range(0, len(body), 6)] == [
        ["0", "2", "1", "10", "9", "yes"],
        ["1", "0", "1", "4", "3", "yes"],
        ["2", "5", "5", "5", "0", "yes"],
        ["3", "1", "7", "15", "8", "no"],
    ]
    assert "decode rows: 2" in found
    places = ", ".join(map(str, mixed.out_locs[2:7]))
    assert f"Row 2 is slot 5: flat tokens 2 to 6, positions 0 to 4 of 5, K and V to {places}; samples." in picture.text
    assert picture.text.endswith("samples nothing.")


def test_rows_share_a_colour_in_both_parts(mixed: Batch) -> None:
    fills = [box.get("fill") for box in boxes(batch_arrays(mixed)) if box.get("fill")]
    assert fills[:4] == fills[4:]
    assert len(set(fills)) == 4


def test_one_decode_row() -> None:
    batch = make([3], [1], [4], [0])
    picture = batch_arrays(batch)
    assert columns(picture, batch) == [["0", "4", "3", str(batch.out_locs[0])]]
    assert_sound(picture)
    mask = attention_mask(batch)
    assert mask.text == "Row 0 (slot 3), 4 positions cached: position 4 sees 0 to 4."
    assert_sound(mask)


def test_of_a_large_step_the_middle_is_left_out(large: Batch) -> None:
    for picture in (batch_arrays(large), attention_mask(large)):
        assert_sound(picture)
    found = texts(batch_arrays(large))
    assert "… and 16 rows more" in found
    assert "… and 24 rows more" in texts(attention_mask(large))
    chunk = make([0, 3], [90, 30], [100, 0], [0])
    found = texts(batch_arrays(chunk))
    assert found.count("…") == 2 * 4
    assert {"100", "104", "188", "189", "28", "29"} <= set(found)
    assert "105" not in found


def areas(picture: Picture) -> list[list[tuple[float, float]]]:
    """Corners of every filled path, each where the pen stands before it goes down or across."""
    found = []
    for path in re.findall(r'<path d="([^"]*)" (?:class="viz-shade"|fill="#\w+")/>', picture.svg):
        x = y = 0.0
        corners = []
        for command, numbers in re.findall(r"([MhHvz])([\d. ]*)", path):
            values = [float(number) for number in numbers.split()]
            if command == "M":
                x, y = values
            elif command in "hH":
                x = values[0] if command == "H" else x + values[0]
            elif command == "v":
                corners.append((x, y))
                y += values[0]
        found.append(corners)
    return found


def test_a_token_sees_its_past_up_to_itself() -> None:
    batch = make([1], [4], [3], [0])
    picture = attention_mask(batch)
    left, cell, top, line = 14 + 104, 26.0, 100.0, 20.0
    cached, computed = areas(picture)
    assert cached == [(left + 3 * cell, top)], "three columns, over all lines"
    assert computed == [(left + (position + 1) * cell, top + (position - 3) * line) for position in range(3, 7)]
    assert picture.text.endswith("position 6 sees 0 to 6.")
    assert_sound(picture)


def test_what_was_cached_is_grey_and_what_is_computed_has_the_colour_of_its_row() -> None:
    picture = attention_mask(make([1, 0], [2, 2], [3, 0], [0, 1]))
    first, _, nothing, _ = areas(picture)
    assert first[0][0] == 14 + 104 + 3 * 26
    assert nothing[0][0] == 14 + 104
    assert [fill in picture.svg for fill in ("#0072b2", "#e69f00", "#009e73")] == [True, True, False]
    assert "row 0: 5 positions, 3 cached, 2 fed" in texts(picture)
    assert "row 1: 2 positions, 2 fed" in texts(picture)


# -- lengths ---------------------------------------------------------------------------------------------------------


def test_a_moment_is_read_off_the_table() -> None:
    table = RunningTable(2, 16)
    prompt = np.arange(6, dtype=np.int32)
    slot = table.admit(Request(uid=0, prompt=prompt, params=SamplingParams(), max_len=9), cached_len=4)
    assert Lengths.of(table, slot, "now") == Lengths("now", kv_len=4, token_len=6, known_len=6, max_len=9)
    table.kv_len[slot] = 6
    table.token_len[slot] = 7
    assert Lengths.of(table, slot, "then") == Lengths("then", kv_len=6, token_len=7, known_len=6, max_len=9)


def test_every_position_says_what_it_is() -> None:
    moments = [Lengths("admitted", 1, 3, 3, 5), Lengths("launched", 3, 4, 3, 5), Lengths("two ahead", 4, 5, 3, 5)]
    found = texts(length_strip(moments))
    lines = [found[found.index(moment.label) + 1 :][:8] for moment in moments]
    assert lines == [
        ["kv", "id", "id", "", "", "1", "3", "3"],
        ["kv", "kv", "kv", "?", "", "3", "4", "3"],
        ["kv", "kv", "kv", "kv", "?", "4", "5", "3"],
    ]
    assert "launched: kv_len 3, token_len 4, known_len 3." in repr(length_strip(moments))


def test_a_long_request_stays_on_its_card() -> None:
    picture = length_strip([Lengths("long", 100, 200, 199, 400)])
    boxes = list(ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"))[1:]
    assert len(boxes) == 400
    assert max(float(box.get("x", "")) + float(box.get("width", "")) for box in boxes) < WIDTH - 120
    assert "kv" not in texts(picture)[4:]


def test_a_row_that_verifies_samples_several_times() -> None:
    picture = batch_arrays(make([1, 0], [1, 3], [4, 6], [0, 1, 1, 1]))
    assert_sound(picture)
    assert picture.text.endswith("; samples 3 times.")
