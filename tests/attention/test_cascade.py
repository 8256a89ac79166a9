"""Cascade attention: finding rows that begin with the same pages, and reading these once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from minisgl.attention import cascade
from minisgl.attention.cascade import CascadeAttention, PrefixGroups, PrefixGroupTracker, find_groups
from minisgl.batch import Batch
from minisgl.context import AttentionSpec
from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array
from tests.attention import PagedSequences, Step

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
        (["abx", "aby", "abz", "ac", "ad"], [([0, 1, 2], 2), ([3, 4], 1)]),  # four pages either way: the longer prefix
        (["abcx", "abcy", "abcz", "abd"], [([0, 1, 2, 3], 2)]),  # three pages are between two depths
    ],
)
def test_each_row_joins_those_with_which_it_saves_most(paths: list[str], expected: list[tuple[list[int], int]]) -> None:
    table, num_pages = table_of(*paths)
    groups = find_groups(table, num_pages, page_size=1, min_rows=2, min_pages=1)
    assert sorted(groups_of(groups)) == sorted(expected)


def test_pages_that_are_not_known_are_equal_to_nothing() -> None:
    table = np.array([[-1, -1], [-1, -1], [4, 5], [4, 5]], dtype=np.int32)
    groups = find_groups(table, np.array([2, 2, 2, 2], dtype=np.int32), page_size=4, min_rows=2, min_pages=1)
    assert groups_of(groups) == [([2, 3], 8)]
    groups = find_groups(table[:2], np.array([2, 2], dtype=np.int32), page_size=4, min_rows=2, min_pages=1)
    assert (groups_of(groups), groups.shared_lens.tolist()) == ([], [0, 0])


def test_all_arrays_of_groups_are_int32() -> None:
    for paths in (["abx", "aby"], ["ax", "by"]):
        table, num_pages = table_of(*paths)
        groups = find_groups(table, num_pages, page_size=4, min_rows=2, min_pages=1)
        arrays = (groups.shared_lens, groups.members, groups.ends, groups.lens)
        assert {array.dtype for array in arrays} == {np.dtype(np.int32)}


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
    assert groups.saved_tokens == sum((len(rows) - 1) * tokens for rows, tokens in groups_of(groups))
    alike = {path[:min_pages] for path in paths}
    if len(paths) >= min_rows and len(alike) == 1 and len(alike.pop()) == min_pages:
        assert len(groups) > 0, "all rows share enough for a group"


class Steps:
    """Decode steps of some slots, with a page table that is told as an engine tells it."""

    def __init__(self, *paths: str) -> None:
        self.rows, num_pages = table_of(*paths)
        self.seq_lens = num_pages * PAGE_SIZE + 1
        self.prefixes = PrefixGroupTracker(len(paths) + 1, self.rows.shape[1], PAGE_SIZE, 1000, 2, 1)
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

    monkeypatch.setattr(cascade, "find_groups", counted)
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
    prefixes = PrefixGroupTracker(4, 8, PAGE_SIZE, 1000, 2, 1)
    steps = Steps("abc", "abc", "abc")
    steps.prefixes = prefixes
    steps.rows = steps.rows[:, :0]
    steps._told = steps.rows
    assert steps.step(0, 1, 2) == []


def test_rows_that_gave_pages_back_share_nothing() -> None:
    """Outside of a sliding window, their entries name the dummy page."""
    steps = Steps("abcd", "abce", "abcf")
    assert steps.step(0, 1, 2) == [([0, 1, 2], 3 * PAGE_SIZE)]
    steps.rows[:, :2] = 1000
    steps.rows[:, 2] = [20, 21, 22]
    assert steps.step(0, 1, 2) == []


DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class EagerCascade(CascadeAttention):
    """Groups all rows that share a page, however few."""

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache, min_rows=2, min_tokens=1, min_saved=1)


def layers(*windows: int | None, group: int = 2, head_dim: int = 16) -> list[AttentionSpec]:
    return [AttentionSpec(i, 2 * group, 2, head_dim, 0.3, window) for i, window in enumerate(windows)]


def family(specs: Sequence[AttentionSpec], **options: object) -> PagedSequences:
    """Rows 0, 1, 2 share 17 pages, and rows 4, 5, 6 share 12; row 3 has its own. All have tokens of their own."""
    sequences = PagedSequences(EagerCascade, DEVICE, specs, [90, 100, 95, 30, 99, 70, 80], page_size=4, **options)
    for row in (1, 2):
        sequences.share(row, 0, 17)
    for row in (5, 6):
        sequences.share(row, 4, 12)
    sequences.fill([80, 75, 90, 22, 60, 60, 61])
    return sequences


def check(sequences: PagedSequences, step: Step, shared: bool = True) -> None:
    key = sequences.backend.plan(step.batch, step.inputs)
    assert key == ("shared" if shared else None)
    pairs = zip(step.layers, sequences.specs, strict=True)
    outputs = [sequences.backend.forward(*qkv, spec) for (qkv, _), spec in pairs]
    sequences.check(outputs, step)


@pytest.mark.parametrize("group", [1, 2, 5])
def test_groups_are_read_together(group: int) -> None:
    sequences = family(layers(None, group=group))
    for _ in range(2):
        check(sequences, sequences.step(dict.fromkeys(range(7), 1)))


def test_groups_over_keys_and_values_of_eight_bits() -> None:
    sequences = family(layers(None), kv_dtype=torch.float8_e4m3fn)
    check(sequences, sequences.step(dict.fromkeys(range(7), 1)))


def test_the_prefix_is_read_from_the_first_members_pages_alone() -> None:
    """What the others' rows of the page table point to does not matter as long as the backend is not told."""
    sequences = family(layers(None))
    check(sequences, sequences.step(dict.fromkeys(range(7), 1)))
    step = sequences.step(dict.fromkeys(range(7), 1))
    members = sequences.backend._device_groups[7].members.tolist()[:6]
    for member in (members[1:3], members[4:6]):
        step.inputs.page_table[sequences.slots[member], :12] = sequences.page_table[-1, 0]
    check(sequences, step)


def test_layers_with_a_window_attend_row_by_row() -> None:
    sequences = family(layers(None, 9, None))
    check(sequences, sequences.step(dict.fromkeys(range(7), 1)))


def test_groups_form_change_and_dissolve() -> None:
    sequences = family(layers(None))
    check(sequences, sequences.step({0: 1, 3: 1}), shared=False)
    check(sequences, sequences.step({0: 1, 3: 1, 2: 1}))  # one joins
    check(sequences, sequences.step({0: 1, 3: 1, 2: 1, 5: 1, 4: 1}))  # a second group
    check(sequences, sequences.step({2: 1, 5: 1, 4: 1}))  # the first loses a member, and dissolves
    check(sequences, sequences.step({4: 1, 3: 1, 2: 1}), shared=False)
    check(sequences, sequences.step({3: 1, 1: 5, 0: 2}), shared=False)  # prefill rows are no members
    check(sequences, sequences.step({0: 1, 1: 1, 3: 2}))  # a mixed step


def test_a_prefix_that_is_pointed_elsewhere_is_not_shared_any_more() -> None:
    """From the page on that changed; the rest of the prefix still is."""
    sequences = family(layers(None))
    check(sequences, sequences.step({0: 1, 1: 1, 2: 1}))
    assert sequences.backend._device_groups[3].lens.tolist()[0] == 17 * 4
    spare = sequences.page_table[sequences.slots[3], 0]
    row = sequences.page_table[sequences.slots[1]]
    for memory in (sequences.kv_cache.k, sequences.kv_cache.v):
        memory[:, spare] = memory[:, row[6]]
    row[6] = spare
    check(sequences, sequences.step({0: 1, 1: 1, 2: 1}))
    assert sequences.backend._device_groups[3].lens.tolist()[0] == 6 * 4


def test_a_slot_that_is_used_again_leaves_its_group() -> None:
    """By a request that has fewer of the shared pages, at the same place in the batch."""
    sequences = family(layers(None))
    check(sequences, sequences.step({0: 1, 1: 1}))
    sequences.kv_lens[1] = 30
    check(sequences, sequences.step({0: 1, 1: 1}))
    assert sequences.backend._device_groups[2].lens.tolist() == [28]


def test_padded_rows_change_no_output() -> None:
    sequences = family(layers(None, None))
    for _ in range(2):
        check(sequences, sequences.step(dict.fromkeys(range(7), 1), padding=3))


def test_rows_of_the_dummy_slot_form_a_group_if_they_are_long() -> None:
    """By which a CUDA graph of a step with groups is recorded before there are any."""
    sequences = family(layers(None))
    step = sequences.step({3: 1}, padding=4)
    step.batch.seq_lens[1:] = 50
    assert sequences.backend.plan(step.batch, step.inputs) == "shared"
    step.batch.seq_lens[1:] = 1
    assert sequences.backend.plan(step.batch, step.inputs) is None


def test_what_saves_too_little_is_left_alone() -> None:
    specs = layers(None)
    for min_saved, shared in ((2 * 68, True), (2 * 68 + 1, False)):
        sequences = family(specs)
        sequences.backend = CascadeAttention(sequences.kv_cache, min_rows=2, min_tokens=1, min_saved=min_saved)
        check(sequences, sequences.step({0: 1, 1: 1, 2: 1, 3: 1}), shared)


def test_members_fill_several_tiles_of_queries() -> None:
    """40 rows of 5 heads are more queries than one tile has."""
    specs = layers(None, group=5)
    sequences = PagedSequences(EagerCascade, DEVICE, specs, [150] * 40, page_size=4, seed=1)
    for row in range(1, 40):
        sequences.share(row, 0, 33)
    sequences.fill([135 + row % 7 for row in range(40)])
    check(sequences, sequences.step(dict.fromkeys(np.random.default_rng(0).permutation(40).tolist(), 1)))
