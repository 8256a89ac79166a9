"""One copy for all arrays of a step."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from minisgl.engine.staging import to_device


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
