"""Running requests that share a prefix attend to it together, and get what they would get alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from minisgl.attention.cascade import CascadeAttention
from minisgl.core import AttentionSpec
from minisgl.kvcache.kv_cache import KVCache
from tests.attention import PagedSequences, Step

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class EagerCascade(CascadeAttention):
    """Groups whatever can be grouped."""

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
    members = sequences.backend._tables[7].members.tolist()[:6]
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
    assert sequences.backend._tables[3].lens.tolist()[0] == 17 * 4
    spare = sequences.page_table[sequences.slots[3], 0]
    row = sequences.page_table[sequences.slots[1]]
    for memory in (sequences.kv_cache.k, sequences.kv_cache.v):
        memory[:, spare] = memory[:, row[6]]
    row[6] = spare
    check(sequences, sequences.step({0: 1, 1: 1, 2: 1}))
    assert sequences.backend._tables[3].lens.tolist()[0] == 6 * 4


def test_a_slot_that_is_used_again_leaves_its_group() -> None:
    """By a request that has fewer of the shared pages, at the same place in the batch."""
    sequences = family(layers(None))
    check(sequences, sequences.step({0: 1, 1: 1}))
    sequences.kv_lens[1] = 30
    check(sequences, sequences.step({0: 1, 1: 1}))
    assert sequences.backend._tables[2].lens.tolist() == [28]


def test_padded_rows_disturb_nobody() -> None:
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
