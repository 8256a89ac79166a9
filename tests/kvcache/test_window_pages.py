"""Window pages: free, held or idle, and the oldest idle ones are taken back first."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.errors import InvariantError
from minisgl.kvcache.window_pages import NOWHERE, WindowPages


def pages(*ids: int) -> np.ndarray:
    return np.array(ids, dtype=np.int32)


def make(num_window_pages: int = 4, cached: tuple[int, ...] = ()) -> WindowPages:
    """Over ten pages, of which some are cached."""
    is_cached = np.zeros(10, dtype=bool)
    is_cached[list(cached)] = True
    return WindowPages(10, num_window_pages, is_cached)


def test_what_nobody_holds_is_free_or_idle_as_its_page_is_cached() -> None:
    windows = make(cached=(3,))
    held = windows.hold(pages(3, 7))
    assert windows.of_page[[3, 7]].tolist() == held.tolist()
    assert windows.available == 2
    windows.drop(held)
    windows.check()
    assert (windows.available, windows.pool.num_free) == (4, 3)
    assert (windows.of_page[3], windows.of_page[7]) == (held[0], NOWHERE)


def test_a_second_holder_gets_the_same_and_the_last_one_to_drop_it_frees_it() -> None:
    windows = make()
    first, second = windows.hold(pages(5)), windows.hold(pages(5))
    assert first.tolist() == second.tolist()
    windows.drop(first)
    assert windows.of_page[5] == first[0]
    windows.drop(second)
    assert windows.of_page[5] == NOWHERE
    windows.check()


def test_the_oldest_idle_ones_are_taken_back_first_and_use_makes_young() -> None:
    windows = make(3, cached=(0, 1, 2, 3, 4))
    for page in (0, 1, 2, 0):  # the last one again
        windows.drop(windows.hold(pages(page)))
    windows.hold(pages(3, 4))
    assert (windows.of_page[:5] != NOWHERE).tolist() == [True, False, False, True, True]
    windows.check()


def test_an_idle_one_is_not_taken_back_for_its_neighbours_in_the_same_call() -> None:
    windows = make(2, cached=(0, 1))
    (window_page,) = windows.hold(pages(0))
    windows.drop(pages(window_page))
    assert windows.hold(pages(0, 1))[0] == window_page
    windows.check()


def test_more_than_are_available_cannot_be_held() -> None:
    windows = make(2)
    windows.hold(pages(0))
    with pytest.raises(InvariantError, match="2 pages wanted, 1 free"):
        windows.hold(pages(1, 2))


def test_one_moves_to_another_page_with_its_holders() -> None:
    windows = make(cached=(8,))
    held = windows.hold(pages(2))
    windows.move(int(held[0]), 8)
    assert (windows.of_page[2], windows.of_page[8]) == (NOWHERE, held[0])
    windows.drop(held)
    windows.check()
    assert windows.of_page[8] == held[0]


def test_pages_that_are_evicted_lose_theirs() -> None:
    windows = make(cached=(1, 2))
    windows.drop(windows.hold(pages(1)))
    windows.forget(pages(1, 2))
    assert windows.pool.num_free == 4
    windows.check()


def test_check_notices_a_lost_one_and_an_idle_one_without_a_cached_page() -> None:
    windows = make(cached=(1,))
    windows.drop(windows.hold(pages(1)))
    windows._is_cached[1] = False
    with pytest.raises(InvariantError, match="not cached"):
        windows.check()
    windows = make()
    windows.page_of[windows.hold(pages(1))] = NOWHERE
    with pytest.raises(InvariantError, match="leaked"):
        windows.check()
    windows = make()
    windows.holders[windows.hold(pages(1))] = 0
    with pytest.raises(InvariantError, match="no row holds"):
        windows.check()
