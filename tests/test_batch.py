"""`build_batch` against loops over tokens."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from minisgl.batch import Batch, build_batch, to_device

PAGES = 8


@st.composite
def steps(draw: st.DrawFn) -> tuple[Batch, list[tuple[int, int, int]], np.ndarray, int]:
    """A batch, (slot, tokens fed, tokens in memory) of its rows, the page table and the page size."""
    page_size = draw(st.sampled_from([1, 2, 4, 16]))
    slots = draw(st.permutations(range(6)))[: draw(st.integers(1, 6))]
    rows = []
    for slot in slots:
        kv_len = draw(st.integers(0, PAGES * page_size - 1))
        rows.append((slot, draw(st.integers(1, PAGES * page_size - kv_len)), kv_len))
    page_table = np.array(draw(st.permutations(range(6 * PAGES))), dtype=np.int32).reshape(6, PAGES)
    slot_array, q_lens, kv_lens = (np.array(column, dtype=np.int32) for column in zip(*rows, strict=True))
    all_rows = np.arange(len(rows), dtype=np.int32)
    batch = build_batch(slot_array, q_lens, kv_lens, page_table, page_size, all_rows, all_rows, num_decode=0)
    return batch, rows, page_table, page_size


@given(steps())
def test_every_fed_token_has_its_slot_position_and_place(
    step: tuple[Batch, list[tuple[int, int, int]], np.ndarray, int],
) -> None:
    batch, rows, page_table, page_size = step
    fed = [(slot, kv_len + i) for slot, q_len, kv_len in rows for i in range(q_len)]
    assert list(zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)) == fed
    places = [int(page_table[slot, p // page_size]) * page_size + p % page_size for slot, p in fed]
    assert batch.out_locs.tolist() == places
    assert len(set(places)) == batch.num_tokens
    starts = [sum(q_len for _, q_len, _ in rows[:r]) for r in range(len(rows) + 1)]
    assert batch.cu_seqlens_q.tolist() == starts
    assert batch.seq_lens.tolist() == [kv_len + q_len for _, q_len, kv_len in rows]
    assert batch.q_lens.tolist() == [q_len for _, q_len, _ in rows]


def test_no_field_of_a_batch_is_assigned_to() -> None:
    one, zero = np.ones(1, dtype=np.int32), np.zeros(1, dtype=np.int32)
    batch = build_batch(zero, one, zero, np.zeros((1, 1), dtype=np.int32), 1, zero, zero, num_decode=0)
    for field in fields(batch):
        with pytest.raises(FrozenInstanceError):
            setattr(batch, field.name, None)


@pytest.mark.parametrize("sizes", [(1, 1, 1), (0, 5, 0, 3), (4, 8), (7,), (0,)])
def test_pieces_are_the_arrays_and_begin_on_boundaries_of_one_buffer(sizes: tuple[int, ...]) -> None:
    """Kernels are compiled for pointers to 16 bytes; a piece elsewhere would have them compiled again."""
    arrays = {str(i): np.arange(size, dtype=np.int32) + 10 * i for i, size in enumerate(sizes)}
    pieces = to_device(arrays, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert list(pieces) == list(arrays)
    for name, array in arrays.items():
        assert pieces[name].dtype == torch.int32
        assert np.array_equal(pieces[name].cpu().numpy(), array)
        assert pieces[name].storage_offset() * 4 % 16 == 0
    assert len({piece.untyped_storage().data_ptr() for piece in pieces.values()}) == 1
