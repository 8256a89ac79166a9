from __future__ import annotations

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from minisgl.batch import build_batch
from minisgl.book import Array, array_map, page_map, step_timeline, token_strip, toy_page_map
from minisgl.book.svg import _PALETTE, WIDTH
from minisgl.book.toy import PagedCache, PagePool
from minisgl.kvcache.radix import RadixCache
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.memory import KVMemory
from minisgl.table import RunningTable
from tests.book.drawing import assert_sound, boxes, texts


def start(memory: KVMemory, uid: int, tokens: list[int]) -> int:
    """A running request whose prompt is computed, as the scheduler would leave it."""
    table = memory.table
    prompt = np.array(tokens, dtype=np.int32)
    request = Request(uid=uid, prompt=prompt, params=SamplingParams(), max_len=len(tokens) + 8)
    prefix = memory.lock_prefix(prompt)
    slot = table.admit(request, len(prefix.pages) * memory.page_size)
    memory.attach(slot, prefix)
    before, table.kv_len[slot] = int(table.kv_len[slot]), len(tokens)
    memory.cache_chunk(slot, before)
    return slot


@pytest.fixture
def memory() -> KVMemory:
    """20 pages of 2 tokens: two requests share two pages, a third has left four pages in the tree."""
    memory = KVMemory(20, RunningTable(4, 32), RadixCache(2))
    gone = start(memory, 0, [7, 7, 7, 7, 7, 7, 7, 7])
    start(memory, 1, [1, 2, 3, 4, 5])
    start(memory, 2, [1, 2, 3, 4, 6, 6, 6])
    memory.free_row(gone, cache=True)
    memory.table.deactivate(gone)
    memory.check()
    return memory


@pytest.fixture
def toy_rows() -> tuple[PagePool, dict[int, PagedCache]]:
    """Row 0 has three pages of the toy's pool, row 3 begins with its first."""
    pool = PagePool({"num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 2}, num_pages=6, page_size=4)
    rows = {0: PagedCache(pool, []), 3: PagedCache(pool, [5])}
    rows[0].reserve(9)
    rows[0].length = 9
    return pool, rows


def test_pages_of_the_toy_are_drawn_as_those_of_the_package(toy_rows: tuple[PagePool, dict[int, PagedCache]]) -> None:
    pool, rows = toy_rows
    assert rows[0].pages == [5, 4, 3]
    picture = toy_page_map(pool, rows)
    found = texts(picture)
    assert found[:2] == ["Page pool: 6 pages of 4 tokens", "3 free, 2 private, 1 cached"]
    assert found[2:14] == ["0", "free", "1", "free", "2", "free", "3", "r0", "4", "r0", "5", "2×"]
    assert found[15:] == [
        *("Pages of r0: 9 positions in 3 pages", "5", "4/4", "4", "4/4", "3", "1/4"),
        *("Pages of r3: 4 positions in 1 page", "5", "4/4"),
    ]
    assert "Request r3 reads pages [5]." in picture.text
    assert_sound(picture)
    assert len(texts(toy_page_map(pool, rows, page_lists=False))) == 15


def test_pages_that_two_rows_have_by_mistake_name_both(toy_rows: tuple[PagePool, dict[int, PagedCache]]) -> None:
    pool, rows = toy_rows
    pool.give_back([4])
    rows[3].pages += pool.take(1)
    assert "r0 r3" in texts(toy_page_map(pool, rows))


def test_arrays_are_drawn_where_they_lie() -> None:
    moments = {"two": [Array(1, 0, 400, 100), Array(2, 500, 500, 500)], "one": [Array(2, 500, 500, 500)]}
    picture = array_map(moments, 1000, "Memory")
    assert [text for text in texts(picture) if text.startswith("row")] == ["row 1", "row 2", "row 2"]
    drawn = [(float(box.get("x", "")) - 14, float(box.get("width", ""))) for box in boxes(picture)]
    scale = (WIDTH - 28) / 1000
    both, second = [(0, 400), (0, 100), (500, 500), (500, 500)], [(500, 500), (500, 500)]
    expected = [(0, 1000), *both, (0, 1000), *second]
    assert drawn == [pytest.approx((start * scale, length * scale)) for start, length in expected]
    assert "one: row 2 500 of 500 from 500 on." in picture.text
    assert_sound(picture)


def test_page_map_says_for_every_page_who_has_it(memory: KVMemory) -> None:
    picture = page_map(memory)
    found = texts(picture)
    assert "Page pool: 20 pages of 2 tokens" in found
    pool = found[2 : 2 + 2 * 20]
    state = dict(zip(map(int, pool[::2]), pool[1::2], strict=True))
    first, second = memory.row(1).tolist(), memory.row(2).tolist()
    assert first[:2] == second[:2]
    for page in range(20):
        if memory.pool.is_free[page]:
            assert state[page] == "free"
        elif page in first[:2]:
            assert state[page] == "2×"
        elif memory.is_cached[page]:
            assert state[page] == ("1×" if page in second else "idle")
        else:
            assert state[page] == ("r1" if page in first else "r2")
    assert list(state.values()).count("idle") == 4
    counts = "11 free, 2 private, 7 cached"
    assert counts in found
    assert picture.text.startswith(f"20 pages of 2 tokens: {counts}.")


def test_page_map_shows_the_rows_and_how_full_their_pages_are(memory: KVMemory) -> None:
    found = texts(page_map(memory))
    title = found.index("Page table, request r2: 7 positions in 4 pages")
    row = memory.row(2).tolist()
    assert found[title + 1 : title + 9 : 2] == [str(page) for page in row]
    assert found[title + 2 : title + 10 : 2] == ["2/2", "2/2", "2/2", "1/2"]
    assert f"Request r2 reads pages {row}." in repr(page_map(memory))


def test_a_row_of_one_page_is_in_the_singular() -> None:
    memory = KVMemory(4, RunningTable(1, 32), RadixCache(2))
    start(memory, 7, [1])
    assert "Page table, request r7: 1 position in 1 page" in texts(page_map(memory))


def test_page_map_has_a_box_a_page(memory: KVMemory) -> None:
    drawn = boxes(page_map(memory))
    assert len(drawn) == 20 + len(memory.row(1)) + len(memory.row(2))
    colours = [box.get("fill") for box in drawn if box.get("fill")]
    assert sorted(set(colours)) == sorted([_PALETTE[1][0], _PALETTE[2][0]])


def test_drawing_changes_nothing(memory: KVMemory) -> None:
    before = memory.page_table.rows.copy(), memory.pool.is_free.copy(), memory.cache.held_pages()
    page_map(memory)
    after = memory.page_table.rows, memory.pool.is_free, memory.cache.held_pages()
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))


def test_token_strip_frames_tokens_by_page() -> None:
    slots, lengths, zero = (np.array([value], dtype=np.int32) for value in (0, 3, 0))
    rows = np.array([[5, 2]], dtype=np.int32)
    batch = build_batch(slots, lengths, zero, rows, 2, sample_rows=zero, output_index=zero, num_decode=0)
    picture = token_strip(["a<b", " is", "\n"], batch, 2)
    found = texts(picture)
    assert found[1:] == [
        *("page 5", "a<b", "position 0", "place 10", "·is", "position 1", "place 11"),
        *("page 2", "↵", "position 2", "place 4"),
    ]
    assert len(boxes(picture)) == 2
    assert "Page 2, place 4: from position 2" in picture.text


def test_step_timeline_has_a_box_for_each_step_of_each_request() -> None:
    picture = step_timeline([{3: 12}, {3: 1}, {4: 5}, {3: 1, 4: 1}])
    drawn = boxes(picture)
    assert len(drawn) == 5
    assert [box.get("fill") for box in drawn] == [_PALETTE[3][0]] * 3 + [_PALETTE[4][0]] * 2
    columns = sorted({float(box.get("x", "")) for box in drawn})
    assert [columns.index(float(box.get("x", ""))) for box in drawn] == [0, 1, 3, 2, 3]
    assert texts(picture)[1:] == ["0", "1", "2", "3", "r3", "12", "1", "1", "r4", "5", "1"]
    assert "Request r3 feeds 12 tokens in step 0, 1 token in each of the steps 1, 3." in picture.text


def test_a_drawing_of_many_steps_stays_on_its_card() -> None:
    for box in boxes(step_timeline([{0: 1}] * 100)):
        assert float(box.get("x", "")) + float(box.get("width", "")) <= WIDTH


def test_a_drawing_is_one_line_and_says_what_it_shows(memory: KVMemory) -> None:
    picture = page_map(memory)
    assert "\n" not in picture._repr_svg_()  # a blank line would end the drawing inside Markdown
    label = ElementTree.fromstring(picture.svg).get("aria-label")
    assert label == picture.text.replace("\n", " ")


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb`` (WCAG 2)."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    dark, light = sorted([luminance(one), luminance(other)])
    return (light + 0.05) / (dark + 0.05)


def test_every_text_stands_out_from_its_ground(memory: KVMemory) -> None:
    for fill, ink in _PALETTE:
        assert contrast(fill, ink) >= 4.5
    style = page_map(memory).svg
    default = dict(re.findall(r"var\(--viz-(\w+),(#\w{6})\)", style))
    for ground in ("card", "shared"):
        assert contrast(default["ink"], default[ground]) >= 4.5
    assert contrast(default["muted"], default["card"]) >= 4.5
