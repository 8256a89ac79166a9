"""Programs that belong to rows: the versions on the way to `triton_decode`, against the same naive attention."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from minisgl.attention.triton_rows import RowAttention
from minisgl.core import AttentionSpec
from tests.attention import PagedSequences

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VERSIONS = [(False, 1), (True, 1), (False, 3), (True, 4), (True, 16)]


def specs(*windows: int | None, group: int = 2, head_dim: int = 16) -> list[AttentionSpec]:
    return [AttentionSpec(i, 2 * group, 2, head_dim, 0.3, window) for i, window in enumerate(windows)]


@pytest.mark.parametrize(("grouped", "pieces"), VERSIONS)
def test_rows_of_unequal_lengths(grouped: bool, pieces: int) -> None:
    """Some shorter than a tile, so that most of their pieces are empty; one layer has a window."""
    make = partial(RowAttention, grouped=grouped, pieces=pieces)
    sequences = PagedSequences(make, DEVICE, specs(None, 50), [3, 40, 300, 130], 16)
    sequences.fill([1, 38, 290, 128])
    for _ in range(2):
        sequences.run(dict.fromkeys(range(4), 1))


def test_a_window_of_few_keys_leaves_pieces_empty() -> None:
    """One layer sees a single key, its own, so that a row has one piece with a key and one without."""
    make = partial(RowAttention, pieces=2)
    sequences = PagedSequences(make, DEVICE, specs(1, 50), [131, 65], 16)
    sequences.fill([128, 64])
    sequences.run({0: 1, 1: 1})


@pytest.mark.parametrize(("group", "head_dim"), [(1, 8), (5, 24), (17, 16)])
def test_groups_and_widths_that_are_no_power_of_two(group: int, head_dim: int) -> None:
    for grouped in (True, False):
        make = partial(RowAttention, grouped=grouped, pieces=3)
        sequences = PagedSequences(make, DEVICE, specs(None, group=group, head_dim=head_dim), [150, 40], 4)
        sequences.fill([148, 38])
        sequences.run({0: 1, 1: 1})


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_in_a_mixed_step(dtype: torch.dtype) -> None:
    make = partial(RowAttention, pieces=2)
    sequences = PagedSequences(make, DEVICE, specs(None), [20, 140, 300], 16, dtype)
    sequences.fill([5, 139, 290])
    sequences.run({1: 1, 2: 1, 0: 11})


def test_pieces_with_scores_far_apart_are_merged() -> None:
    """They are weighted relative to the largest sum of weights, or powers of two overflow."""
    make = partial(RowAttention, pieces=4)
    sequences = PagedSequences(make, DEVICE, specs(None), [150, 80], 4)
    for q, k, _ in sequences.sequences:
        for row in range(2):
            q[row] *= 60
            k[row] *= 60
    sequences.fill([148, 78])
    sequences.run({0: 1, 1: 1})
