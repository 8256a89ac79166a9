"""Real ranks compare their free memory."""

from __future__ import annotations

from minisgl.book import compare_free_memory

GIB = 1 << 30


def test_all_ranks_learn_the_least_and_the_most_and_who_has_them() -> None:
    found = compare_free_memory([80 * GIB, 75 * GIB])
    assert [(rank.least, rank.most) for rank in found] == [(75 * GIB, 80 * GIB)] * 2
    assert all("rank 1 has 76800 MiB free and rank 0 has 81920 MiB" in rank.error for rank in found)


def test_ranks_that_are_close_find_nothing_wrong() -> None:
    assert [rank.error for rank in compare_free_memory([80 * GIB, 79 * GIB])] == ["", ""]
