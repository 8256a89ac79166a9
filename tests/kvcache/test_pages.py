from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minisgl.core.request import Int32Array
from minisgl.errors import InvariantError
from minisgl.kvcache.pages import PagePool


def array(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


@pytest.fixture
def pool() -> PagePool:
    return PagePool(num_pages=6)


def test_every_page_is_handed_out_once(pool: PagePool) -> None:
    first, second = pool.alloc(2), pool.alloc(4)
    assert sorted([*first.tolist(), *second.tolist()]) == list(range(6))
    assert first.dtype == np.int32
    assert pool.num_free == 0
    assert not pool.is_free.any()
    pool.check()


def test_the_most_recently_freed_come_first(pool: PagePool) -> None:
    pool.alloc(6)
    pool.free(array(4, 1))
    pool.free(array(3))
    assert pool.alloc(3).tolist() == [3, 1, 4]


def test_no_pages_are_no_trouble(pool: PagePool) -> None:
    assert pool.alloc(0).tolist() == []
    pool.free(array())
    assert pool.num_free == 6


def test_what_alloc_returned_does_not_change_with_the_pool(pool: PagePool) -> None:
    pages = pool.alloc(3)
    before = pages.tolist()
    pool.free(pages)
    pool.alloc(2)
    pool.free(array(before[-1]))
    assert pages.tolist() == before


def test_too_many_wanted(pool: PagePool) -> None:
    pool.alloc(4)
    with pytest.raises(InvariantError):
        pool.alloc(3)
    assert pool.num_free == 2


@pytest.mark.parametrize("pages", [array(0, 5), array(0, 0)], ids=["free already", "named twice"])
def test_a_page_freed_twice(pool: PagePool, pages: Int32Array) -> None:
    pool.alloc(3)  # pages 0, 1, 2
    with pytest.raises(InvariantError):
        pool.free(pages)
    assert pool.num_free == 3
    pool.check()


@given(st.lists(st.integers(0, 8), max_size=30), st.randoms(use_true_random=False))
@settings(max_examples=50, derandomize=True, database=None)
def test_pages_are_conserved(counts: list[int], random: Random) -> None:
    pool, held = PagePool(16), []
    for count in counts:
        if count <= pool.num_free:
            held += pool.alloc(count).tolist()
        else:
            random.shuffle(held)
            pool.free(array(*held[:count]))
            del held[:count]
        assert len(set(held)) == len(held) == 16 - pool.num_free
        assert np.flatnonzero(~pool.is_free).tolist() == sorted(held)
        pool.check()


def test_check_notices_a_flag_that_is_wrong(pool: PagePool) -> None:
    pool.is_free[pool.alloc(1)] = True
    with pytest.raises(InvariantError):
        pool.check()


def test_check_notices_a_page_that_is_free_twice(pool: PagePool) -> None:
    pool._stack[0] = pool._stack[1]
    with pytest.raises(InvariantError):
        pool.check()
