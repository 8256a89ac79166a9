"""Random steps over random sequences, against a loop over tokens."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import Phase, given, settings

from tests.contracts.test_attention_backend import CONTRACTS, INTERPRETED, MARKS, PAGE_SIZES, Paged, layers, paged_for

__all__ = ["CONTRACTS", "INTERPRETED", "MARKS"]  # conftest looks for them here
LONGEST = 50

windows = st.none() | st.integers(1, LONGEST)
lengths_lists = st.lists(st.integers(1, LONGEST), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def paged(request: pytest.FixtureRequest) -> Paged:
    return paged_for(request.param)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@given(lengths=lengths_lists, first=windows, second=windows, group=st.sampled_from([1, 3]), data=st.data())
@settings(max_examples=15, derandomize=True, database=None, phases=[Phase.generate, Phase.shrink])
def test_random_steps(
    paged: Paged,
    page_size: int,
    lengths: list[int],
    first: int | None,
    second: int | None,
    group: int,
    data: st.DataObject,
) -> None:
    """Rows begin with a prefix in memory, some of it shared; each of three steps feeds some of them some tokens."""
    specs = layers(first, second, heads=2 * group)
    sequences = paged(specs, lengths, page_size)
    kv_lens = [data.draw(st.integers(0, length - 1)) for length in lengths]
    for row in range(1, len(lengths)):
        sequences.share(row, 0, data.draw(st.integers(0, min(kv_lens[0], kv_lens[row]) // page_size)))
    sequences.fill(kv_lens)
    for _ in range(3):
        left = {row: length - int(sequences.kv_lens[row]) for row, length in enumerate(lengths)}
        feeds = {row: data.draw(st.integers(0, min(count, 20))) for row, count in left.items()}
        decode = [row for row, count in feeds.items() if count == 1 and sequences.kv_lens[row] > 0]
        order = [*decode, *(row for row, count in feeds.items() if count > 0 and row not in decode)]
        if order:
            num_decode = data.draw(st.integers(0, len(decode)))
            sequences.run({row: feeds[row] for row in order}, num_decode)
