"""Every number of rows has a graph to go to, and padding disturbs nobody."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.graphs import graph_sizes, pad_batch
from tests.steps import step_of


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 20, 32, 33, 100, 256, 300])
def test_every_number_of_rows_has_a_size_that_is_not_much_larger(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == largest
    for rows in range(1, largest + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(rows, 16)


def test_padded_rows_are_single_tokens_of_the_dummy_slot() -> None:
    batch, _ = step_of([1, 1, 1], [5, 9, 2])
    padded = pad_batch(batch, 8, dummy_slot=20)
    assert padded.num_rows == padded.num_decode == padded.num_tokens == 8
    assert padded.slots.tolist() == [*batch.slots.tolist(), *[20] * 5]
    assert padded.seq_lens.tolist() == [6, 10, 3, 1, 1, 1, 1, 1]
    assert padded.cu_seqlens_q.tolist() == list(range(9))
    assert np.array_equal(padded.sample_rows, batch.sample_rows)


def test_a_full_batch_is_left_alone() -> None:
    batch, _ = step_of([1, 1], [5, 9])
    assert pad_batch(batch, 2, dummy_slot=20) is batch
