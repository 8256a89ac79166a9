"""A graph has one shape; a step is padded up to it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from minisgl.core.batch import Batch
from minisgl.core.request import Int32Array

_SMALL = (1, 2, 4, 8, 16, 24, 32)
_STRIDE = 16


def graph_sizes(largest: int) -> tuple[int, ...]:
    """Numbers of rows to capture, ascending, so that every number up to ``largest`` has one that is not much larger.

    Small steps are the ones whose time depends on each row: powers of two first, then multiples of eight. Above 32
    rows padding up to 15 rows costs next to nothing, since the matrix kernels work in tiles of 64 rows and more.
    """
    sizes = {*_SMALL, *range(_SMALL[-1] + _STRIDE, largest, _STRIDE), largest}
    return tuple(sorted(size for size in sizes if size <= largest))


def pad_batch(batch: Batch, rows: int, dummy_slot: int) -> Batch:
    """Add decode rows of one token to a decode step, on the dummy slot, whose page-table row is the dummy page.

    They read and write the dummy page, which belongs to nobody, and sample a token that nobody reads.

    Args:
        batch: decode rows only.
        rows: of the result, at least those of ``batch``.
        dummy_slot: the extra row of the token and page tables.
    """
    missing = rows - batch.num_rows
    if missing == 0:
        return batch

    def padded(values: Int32Array, value: int) -> Int32Array:
        return np.concatenate([values, np.full(missing, value, dtype=np.int32)])

    return replace(
        batch,
        slots=padded(batch.slots, dummy_slot),
        cu_seqlens_q=np.arange(rows + 1, dtype=np.int32),
        seq_lens=padded(batch.seq_lens, 1),
        positions=padded(batch.positions, 0),
        token_slots=padded(batch.token_slots, dummy_slot),
        num_decode=rows,
    )
