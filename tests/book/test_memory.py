from __future__ import annotations

import re
from itertools import pairwise
from xml.etree import ElementTree

import pytest

from minisgl.book import Picture, PoolUse, memory_budget, pool_use
from minisgl.book.svg import WIDTH
from minisgl.errors import ConfigError
from tests.book.drawing import SVG, assert_sound, boxes, texts
from tests.scheduler.harness import Harness

# -- memory budget ---------------------------------------------------------------------------------------------------

GIB = 2**30


def test_the_bar_is_cut_in_proportion_and_what_is_left_is_free() -> None:
    picture = memory_budget({"weights": 15 * GIB, "KV <pages>": 45 * GIB}, 80 * GIB, "H200")
    bar = [box for box in boxes(picture) if box.get("height") == "40"]
    assert [float(box.get("width", "")) / (WIDTH - 28) for box in bar] == pytest.approx(
        [15 / 80, 45 / 80, 20 / 80], 1e-3
    )
    assert [(float(box.get("x", "")) - 14) / (WIDTH - 28) for box in bar] == pytest.approx([0, 15 / 80, 60 / 80], 1e-3)
    assert texts(picture)[:2] == ["H200", "80.00 GiB"]
    listed = texts(picture)[2:]
    for entry in (
        ["1", "weights", "15.00 GiB", "18.8 %"],
        ["2", "KV <pages>", "45.00 GiB", "56.2 %"],
        ["3", "free", "20.00 GiB", "25.0 %"],
    ):
        start = listed.index(entry[1]) - 1
        assert listed[start : start + 4] == entry
        assert f"{entry[0]}. {entry[1]}: {entry[2]}, {entry[3]}." in picture.text
    assert listed.count("1") == listed.count("2") == listed.count("3") == 2
    assert_sound(picture)


def test_small_parts_have_their_numbers_above_the_bar_and_apart() -> None:
    parts = {name: size for name, size in zip("abcdefgh", [500, 1, 1, 1, 0, 1, 1, 400], strict=True)}
    picture = memory_budget(parts, 1000)
    assert_sound(picture)
    above = [float(x) for x in re.findall(r'<text x="([\d.]+)" y="51" ', picture.svg)]
    assert len(above) == 5
    assert all(right - left >= 20 for left, right in pairwise(above))


def test_units() -> None:
    picture = memory_budget({"a": 1, "b": 1023, "c": 1024, "d": 3 * 2**20, "e": 2**40}, 5 * 2**40)
    assert {"1 byte", "1023 bytes", "1.00 KiB", "3.00 MiB", "1.00 TiB", "5.00 TiB"} <= set(texts(picture))


@pytest.mark.parametrize(("parts", "total"), [({"a": 11}, 10), ({"a": -1}, 10), ({}, 0)])
def test_what_does_not_fit_is_refused(parts: dict[str, int], total: int) -> None:
    with pytest.raises(ConfigError, match="fit into"):
        memory_budget(parts, total)


def test_nothing_and_all_in_use() -> None:
    assert texts(memory_budget({}, 8))[-4:] == ["free", "8 bytes", "100.0 %", "1"]
    assert_sound(memory_budget({}, 8))
    assert len(boxes(memory_budget({"a": 8}, 8))) == 3


# -- pool use --------------------------------------------------------------------------------------------------------


def paths(picture: Picture) -> list[str]:
    """Empty pool, read or idle, read, promised, running."""
    return [element.get("d", "") for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}path")]


def heights(path: str) -> list[float]:
    return [float(y) for y in re.findall(r"V([\d.]+)H\d", path)]


def test_a_pool_in_use() -> None:
    harness = Harness(page_size=4, num_pages=16, max_running=4)
    harness.add([0] * 9, max_tokens=1)
    harness.run()
    for seed in (1, 2):
        harness.add([seed] * 6, max_tokens=8)
    assert PoolUse.of(harness.memory) == PoolUse(read=0, idle=2, promised=0, running=0)
    harness.step()
    # Two rows of two pages, which will have 13 positions in four pages.
    assert PoolUse.of(harness.memory, preempted=1) == PoolUse(read=4, idle=2, promised=4, running=2, preempted=1)


def test_pages_that_two_requests_read_count_once() -> None:
    harness = Harness(page_size=4, num_pages=16, max_running=4)
    for _ in range(2):
        harness.add([1] * 9, max_tokens=4)
    harness.step()
    assert PoolUse.of(harness.memory).read == 4  # two shared, and one each for the last prompt token


def test_the_areas_are_in_proportion() -> None:
    moments = [PoolUse(2, 1, 3, 1), PoolUse(6, 2, 4, 3, preempted=2), PoolUse(0, 8, 0, 0)]
    picture = pool_use(moments, 8, "Optimism")
    _, full, read, promised, running = paths(picture)
    bottom, tall = 232.0, 140.0
    assert [(bottom - y) / tall * 8 for y in heights(full)[:3]] == [3, 8, 8]
    assert [(bottom - y) / tall * 8 for y in heights(read)[:3]] == [2, 6, 0]
    assert [(bottom - y) / tall * 8 for y in heights(promised)] == [5, 8, 0], "cut off at the size of the pool"
    assert [round((292.0 - y) / 40 * 3, 1) for y in heights(running)[:3]] == [1, 3, 0]
    assert texts(picture).count("×") == 1
    assert "Optimism: 3 steps, 33% of the pool read on average, 2 preemptions" in texts(picture)
    assert "Pages read: 2 6 0." in picture.text
    assert_sound(picture)


def test_a_long_run_fits_and_a_short_one_beside_it_has_the_same_scale() -> None:
    long, short = ([PoolUse(step % 9, 0, 0, 1, step % 50 == 3) for step in range(count)] for count in (900, 300))
    pictures = [pool_use(long, 8, "long"), pool_use(short, 8, "short", span=900)]
    for picture in pictures:
        assert_sound(picture)
    ends = [float(re.findall(r"H([\d.]+)", paths(picture)[2])[-2]) - 64 for picture in pictures]
    assert abs(ends[0] / ends[1] - 3) < 0.01
