"""What is stored, and in which dtype."""

from __future__ import annotations

from random import Random

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from minisgl.errors import InvariantError
from minisgl.kvcache.pool import KVCache, PagePool, PageTable, table_width
from minisgl.request import Int32Array


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


@pytest.fixture
def table() -> PageTable:
    return PageTable(max_running=3, max_seq_len=100, page_size=4, dummy_page=50)


@pytest.mark.parametrize(
    ("max_seq_len", "page_size", "width"),
    [(1, 1, 32), (32, 1, 32), (33, 1, 64), (512, 16, 32), (513, 16, 64), (100, 256, 32)],
)
def test_rows_are_aligned_to_128_bytes(max_seq_len: int, page_size: int, width: int) -> None:
    assert table_width(max_seq_len, page_size) == width
    rows = PageTable(2, max_seq_len, page_size, 0).rows
    assert rows.shape == (3, width)
    assert rows.strides[0] % 128 == 0


def test_starts_on_the_dummy_page(table: PageTable) -> None:
    assert table.rows.shape == (4, 32)
    assert (table.rows == 50).all()
    assert [changes.tolist() for changes in table.take_changes()] == [[], []]


def test_write_sets_part_of_one_row(table: PageTable) -> None:
    table.write(1, 2, array(7, 8))
    expected = np.full((4, 32), 50)
    expected[1, 2:4] = [7, 8]
    assert (table.rows == expected).all()


def test_append_sets_one_entry_in_each_row(table: PageTable) -> None:
    table.append(slots=array(2, 0), columns=array(5, 31), pages=array(7, 8))
    expected = np.full((4, 32), 50)
    expected[2, 5], expected[0, 31] = 7, 8
    assert (table.rows == expected).all()


def test_a_copy_that_follows_the_changes_equals_the_table(table: PageTable) -> None:
    random = np.random.default_rng(0)
    copy = table.rows.copy()
    for _ in range(30):
        for _ in range(random.integers(0, 4)):
            start, count = random.integers(0, 16, 2).tolist()
            table.write(int(random.integers(3)), start, random.integers(0, 50, count, dtype=np.int32))
            slots = random.permutation(3)[:2].astype(np.int32)
            table.append(slots, random.integers(0, 32, 2, dtype=np.int32), random.integers(0, 50, 2, dtype=np.int32))
        index, values = table.take_changes()
        assert index.dtype == values.dtype == np.int32
        assert (np.diff(index) > 0).all()
        copy.reshape(-1)[index] = values
        assert (copy == table.rows).all()
        assert (table.rows[3] == 50).all()


def test_changes_are_reported_once_with_their_last_value(table: PageTable) -> None:
    table.write(0, 0, array(1, 2))
    table.write(0, 1, array(3))
    index, values = table.take_changes()
    assert index.tolist() == [0, 1]
    assert values.tolist() == [1, 3]
    assert len(table.take_changes()[0]) == 0


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EIGHT_BITS = torch.float8_e4m3fn


def cache_of(dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> KVCache:
    """Two layers, three pages of four tokens, one head of eight; everything is NaN but the dummy page."""
    cache = KVCache(2, 1, 8, 3, 4, dtype, DEVICE, kv_dtype)
    for memory in (cache.k, cache.v):
        memory[:, :3] = torch.tensor(torch.nan).to(memory.dtype)
    return cache


def stored(cache: KVCache, values: torch.Tensor) -> torch.Tensor:
    """``values``, [8], written as the only key of a step, and read again; the value is its opposite."""
    k = values.to(DEVICE, cache.dtype).view(1, 1, 8)
    cache.store(1, k, -k, torch.tensor([6], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache.k[1, 1, 2].float(), -cache.v[1, 1, 2].float())
    return cache.k[1, 1, 2, 0].double().cpu()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_are_kept_in_the_models_dtype(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    assert cache.dtype == cache.k.dtype == cache.v.dtype == dtype
    values = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(stored(cache, values), values.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_eight_bits_keep_three_of_mantissa(dtype: torch.dtype) -> None:
    cache = cache_of(dtype, EIGHT_BITS)
    assert (cache.dtype, cache.k.dtype, cache.v.dtype) == (dtype, EIGHT_BITS, EIGHT_BITS)
    values = torch.tensor([1.0, 1.05, 1.07, -101.0, 2**-6, 2**-9, 0.3 * 2**-9, 0.0])
    assert stored(cache, values).tolist() == [1.0, 1.0, 1.125, -104.0, 2**-6, 2**-9, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_eight_bits_cannot_hold_is_cut_off(dtype: torch.dtype) -> None:
    values = torch.tensor([448.0, 449.0, 470.0, 1000.0, -1000.0, 60000.0, torch.inf, -torch.inf])
    assert stored(cache_of(dtype, EIGHT_BITS), values).abs().tolist() == [448.0] * 8


@pytest.mark.parametrize("kv_dtype", [None, EIGHT_BITS])
def test_nothing_else_is_written_and_the_dummy_page_is_finite(kv_dtype: torch.dtype | None) -> None:
    cache = cache_of(torch.float32, kv_dtype)
    stored(cache, torch.ones(8))
    for memory in (cache.k.float(), cache.v.float()):
        assert (memory[:, 3] == 0).all()
        assert memory[:, :3].isfinite().sum() == 8
