from __future__ import annotations

import re
from xml.etree import ElementTree

from minisgl.viz import Picture, PoolUse, pool_use
from tests.scheduler.harness import Harness
from tests.viz.drawing import SVG, assert_sound, texts


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
