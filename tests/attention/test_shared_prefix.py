"""Finding groups of rows that begin with the same pages."""

from __future__ import annotations

from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings

from minisgl.attention import shared_prefix
from minisgl.attention.shared_prefix import PrefixGroups, SharedPrefixes, find_groups
from minisgl.core import Batch
from minisgl.core.request import Int32Array

PAGE_SIZE = 4


def table_of(*paths: str) -> tuple[Int32Array, Int32Array]:
    """A page table from rows of letters, one a page; the same letter in the same column is the same page only if all
    before are the same, as in a tree."""
    width = max(map(len, paths))
    ids: dict[str, int] = {}
    rows = [[ids.setdefault(path[: i + 1], len(ids)) for i in range(len(path))] for path in paths]
    table = np.array([row + [999] * (width - len(row)) for row in rows], dtype=np.int32)
    return table, np.array([len(path) for path in paths], dtype=np.int32)


def groups_of(groups: PrefixGroups) -> list[tuple[list[int], int]]:
    """(rows, shared tokens) of each group."""
    begins = [0, *groups.ends.tolist()]
    return [
        (sorted(groups.members[begin:end].tolist()), int(length))
        for begin, end, length in zip(begins[:-1], groups.ends, groups.lens, strict=True)
    ]


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["abcx", "abcy", "abcz"], [([0, 1, 2], 3)]),
        (["abcdefg", "abcdefgh", "abcdefg"], [([0, 1, 2], 7)]),  # between two depths that are looked at
        (["abc", "abd", "xyz", "xyw", "q"], [([0, 1], 2), ([2, 3], 2)]),
        (["ab", "cd", "ef"], []),
        (["a"], []),
        (["", "", ""], []),
        (["a" * 9 + "b", "a" * 9 + "c", "a" * 2, "a" * 2 + "x"], [([0, 1], 9), ([2, 3], 2)]),  # the deep pair leaves
        (["ax", "ay", "az", "aw", "abcd", "abcd"], [([0, 1, 2, 3, 4, 5], 1)]),  # five pages saved, not four
        (["abcdefgh", "abcdefgh", "abzz"], [([0, 1], 8)]),
    ],
)
def test_each_row_joins_those_with_which_it_saves_most(paths: list[str], expected: list[tuple[list[int], int]]) -> None:
    table, num_pages = table_of(*paths)
    groups = find_groups(table, num_pages, page_size=1, min_rows=2, min_pages=1)
    assert sorted(groups_of(groups)) == sorted(expected)


def test_small_groups_and_short_prefixes_do_not_count() -> None:
    table, num_pages = table_of("abcx", "abcy", "abcz", "de", "de", "de", "de")
    assert groups_of(find_groups(table, num_pages, 16, 4, 1)) == [([3, 4, 5, 6], 32)]
    assert groups_of(find_groups(table, num_pages, 16, 2, 3)) == [([0, 1, 2], 48)]
    assert groups_of(find_groups(table, num_pages, 16, 4, 3)) == []


paths = st.lists(st.text("ab", max_size=12), min_size=1, max_size=8)


@given(paths=paths, min_rows=st.integers(2, 4), min_pages=st.integers(1, 4))
@settings(max_examples=200, derandomize=True, database=None)
def test_groups_share_what_they_claim(paths: list[str], min_rows: int, min_pages: int) -> None:
    if not any(paths):
        return
    table, num_pages = table_of(*paths)
    groups = find_groups(table, num_pages, PAGE_SIZE, min_rows, min_pages)
    listed = [row for rows, _ in groups_of(groups) for row in rows]
    assert len(set(listed)) == len(listed)
    expected = np.zeros(len(paths), dtype=np.int32)
    for rows, tokens in groups_of(groups):
        pages = tokens // PAGE_SIZE
        assert len(rows) >= min_rows
        assert pages >= min_pages
        assert len({paths[row][:pages] for row in rows}) == 1
        assert all(len(paths[row]) >= pages for row in rows)
        assert any(len(paths[row]) == pages for row in rows) or len({paths[row][: pages + 1] for row in rows}) > 1
        expected[rows] = tokens
    assert groups.shared_lens.tolist() == expected.tolist()
    assert groups.saved == sum((len(rows) - 1) * tokens for rows, tokens in groups_of(groups))
    alike = {path[:min_pages] for path in paths}
    if len(paths) >= min_rows and len(alike) == 1 and len(alike.pop()) == min_pages:
        assert len(groups) > 0, "all rows share enough, so somebody does"


class Steps:
    """Decode steps of some slots, with a page table that is told as an engine tells it."""

    def __init__(self, *paths: str) -> None:
        self.rows, num_pages = table_of(*paths)
        self.seq_lens = num_pages * PAGE_SIZE + 1
        self.prefixes = SharedPrefixes(len(paths) + 1, self.rows.shape[1], PAGE_SIZE, 1000, 2, 1)
        self._told = np.full_like(self.rows, -1)

    def step(self, *slots: int, num_decode: int | None = None) -> list[tuple[list[int], int]]:
        """Groups, their rows as slots."""
        changed = np.flatnonzero(self.rows != self._told).astype(np.int32)
        self._told = self.rows.copy()
        order = np.array(slots, dtype=np.int32)
        nothing = np.zeros(0, dtype=np.int32)
        batch = Batch(
            slots=order,
            cu_seqlens_q=np.arange(len(slots) + 1, dtype=np.int32),
            seq_lens=self.seq_lens[order],
            positions=self.seq_lens[order] - 1,
            token_slots=order,
            out_locs=nothing,
            sample_rows=nothing,
            output_index=nothing,
            num_decode=len(slots) if num_decode is None else num_decode,
            page_index=changed,
            page_value=self.rows.reshape(-1)[changed],
        )
        self.last = batch
        groups = self.prefixes.update(batch)
        return [(sorted(order[rows].tolist()), tokens) for rows, tokens in groups_of(groups)]


def test_groups_are_kept_until_something_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    searches: list[int] = []

    def counted(*args: Any) -> PrefixGroups:
        searches.append(len(searches))
        return find_groups(*args)

    monkeypatch.setattr(shared_prefix, "find_groups", counted)
    steps = Steps("abcu", "abcv", "abcw", "abxx")
    assert steps.step(0, 1, 2) == [([0, 1, 2], 12)]
    assert steps.step(0, 1, 2) == [([0, 1, 2], 12)]
    steps.seq_lens += 1
    steps.rows[3, 0] = 77  # the row of a request that does not decode
    assert steps.step(0, 1, 2) == [([0, 1, 2], 12)]
    assert len(searches) == 1
    assert steps.step(2, 1, 0) == [([0, 1, 2], 12)]
    assert len(searches) == 2, "another order of rows is another step"


def test_a_new_page_behind_the_others_changes_nothing() -> None:
    steps = Steps("abcu", "abcv")
    steps.seq_lens[:] = 13  # the fourth page holds the token that is being fed
    assert steps.step(0, 1) == [([0, 1], 12)]
    groups = steps.prefixes.update(steps.last)
    steps.rows[0, 3] = 60
    assert steps.step(0, 1) == [([0, 1], 12)]
    assert steps.prefixes.update(steps.last) is groups


def test_a_page_that_changes_between_decode_steps_is_noticed() -> None:
    steps = Steps("abcu", "abcv", "abcw", "x")
    assert steps.step(0, 1, 2) == [([0, 1, 2], 12)]
    steps.rows[1, 1] = 70
    assert steps.step(3, num_decode=0) == []  # a prefill step brings the news
    assert steps.step(0, 1, 2) == [([0, 2], 12)]
    steps.rows[1, 1] = steps.rows[0, 1]
    assert steps.step(0, 1, 2) == [([0, 1, 2], 12)]


def test_a_shorter_request_in_the_same_slot_is_noticed() -> None:
    steps = Steps("abcu", "abcv")
    assert steps.step(0, 1) == [([0, 1], 12)]
    steps.seq_lens[1] = 10
    assert steps.step(0, 1) == [([0, 1], 8)]


def test_the_page_of_the_token_that_is_fed_is_not_shared() -> None:
    steps = Steps("abc", "abc")
    steps.seq_lens[:] = 12
    assert steps.step(0, 1) == [([0, 1], 8)]
    steps.seq_lens[:] = 13
    assert steps.step(0, 1, num_decode=2) == [([0, 1], 8)], "more could be shared; it is found with the next change"


def test_slots_that_were_never_written_share_nothing() -> None:
    prefixes = SharedPrefixes(4, 8, PAGE_SIZE, 1000, 2, 1)
    steps = Steps("abc", "abc", "abc")
    steps.prefixes = prefixes
    steps.rows = steps.rows[:, :0]
    steps._told = steps.rows
    assert steps.step(0, 1, 2) == []
