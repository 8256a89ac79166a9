from __future__ import annotations

import numpy as np
import pytest

from minisgl.core.request import Int32Array
from minisgl.kvcache.page_table import PageTable, table_width


def array(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


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
