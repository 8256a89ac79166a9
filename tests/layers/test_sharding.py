"""Who holds what: every element of a dimension once, KV heads beside their query heads, errors that name the size."""

from __future__ import annotations

import pytest

from minisgl.errors import ConfigError
from minisgl.layers.sharding import divide, divide_kv_heads, divide_vocabulary
from tests.distributed.ranks import Position


@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_every_element_belongs_to_one_rank(size: int) -> None:
    shares = [divide("intermediate_size", 48, Position(rank, size)) for rank in range(size)]
    assert [element for share in shares for element in range(share.start, share.stop)] == list(range(48))
    assert {share.total for share in shares} == {48}


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), [(8, 8, 4), (8, 2, 2), (8, 2, 4), (8, 2, 8), (16, 1, 4), (12, 4, 2)]
)
def test_a_rank_has_the_kv_heads_that_its_query_heads_share(heads: int, kv_heads: int, size: int) -> None:
    for rank in range(size):
        mine = divide("num_attention_heads", heads, Position(rank, size))
        kv = divide_kv_heads(kv_heads, Position(rank, size))
        needed = {head * kv_heads // heads for head in range(mine.start, mine.stop)}
        assert needed == set(range(kv.start, kv.stop))


@pytest.mark.parametrize(("kv_heads", "size"), [(3, 2), (4, 3), (2, 3), (4, 6), (6, 4)])
def test_kv_heads_that_ranks_cannot_share(kv_heads: int, size: int) -> None:
    with pytest.raises(
        ConfigError, match=rf"tensor_parallel_size: {size} ranks cannot share num_key_value_heads of {kv_heads}"
    ):
        divide_kv_heads(kv_heads, Position(0, size))


def test_heads_that_ranks_cannot_share() -> None:
    with pytest.raises(ConfigError, match="2 ranks cannot share num_attention_heads of 9 equally"):
        divide("num_attention_heads", 9, Position(1, 2))


@pytest.mark.parametrize(("vocab", "size", "each"), [(211, 2, 106), (211, 4, 53), (212, 4, 53), (3, 4, 1), (5, 4, 2)])
def test_a_vocabulary_is_padded_at_its_end(vocab: int, size: int, each: int) -> None:
    shares = [divide_vocabulary(vocab, Position(rank, size)) for rank in range(size)]
    assert [share.size for share in shares] == [each] * size
    assert [token for share in shares for token in range(share.start, min(share.stop, vocab))] == list(range(vocab))


def test_a_head_is_several_rows() -> None:
    rows = divide("num_attention_heads", 8, Position(1, 4)).times(16)
    assert (rows.start, rows.stop, rows.total) == (32, 64, 128)
