"""What the scheduler tells the executor: the arrays of every kind of step, and their order."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest

from minisgl.core import Batch, RequestState
from tests.scheduler.harness import Harness


def two_decodes_and_two_prefills() -> tuple[Harness, Batch]:
    """A mixed step over 4-token pages: rows of requests 0, 1 decode, 2 continues in chunks, 3 is admitted."""
    harness = Harness(batch_policy="mixed", page_size=4, max_prefill_tokens=8, prefix_cache="none", num_pages=64)
    harness.add([0] * 3, max_tokens=9)
    harness.add([1] * 4, max_tokens=9)
    harness.step()
    harness.add([2] * 14, max_tokens=9)
    harness.step()
    harness.add([3] * 9, max_tokens=9)
    harness.step()
    return harness, harness.batches[-1]


def test_a_mixed_step_is_laid_out_as_documented() -> None:
    harness, batch = two_decodes_and_two_prefills()
    slots = [harness.table.slots.tolist().index(slot) for slot in batch.slots.tolist()]
    assert slots == [0, 1, 2, 3]
    assert batch.num_decode == 2
    assert batch.cu_seqlens_q.tolist() == [0, 1, 2, 8, 10]
    assert batch.q_lens.tolist() == [1, 1, 6, 2]
    assert batch.seq_lens.tolist() == [5, 6, 14, 2]
    assert batch.positions.tolist() == [4, 5, 8, 9, 10, 11, 12, 13, 0, 1]
    assert batch.token_slots.tolist() == np.repeat(batch.slots, batch.q_lens).tolist()
    assert batch.sample_rows.tolist() == [0, 1, 2]  # the last row has seven tokens to go
    assert batch.output_index.tolist() == [2, 2, 0]
    rows = harness.memory.page_table.rows
    expected = [
        int(rows[slot, position // 4]) * 4 + position % 4
        for slot, position in zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)
    ]
    assert batch.out_locs.tolist() == expected
    assert [new.slot for new in batch.new_requests] == [batch.slots[3]]
    assert (batch.num_rows, batch.num_tokens, batch.max_q_len, batch.max_seq_len) == (4, 10, 6, 14)


def test_a_long_prompt_comes_in_chunks_of_which_the_last_samples() -> None:
    harness = Harness(max_prefill_tokens=4)
    request = harness.add([1, 2, 0, 1, 2, 2, 1, 0, 1, 1], max_tokens=2)
    batches = []
    for _ in range(3):  # results may come in later
        batch = harness.scheduler.schedule()
        assert batch is not None
        batches.append(batch)
    assert [batch.q_lens.tolist() for batch in batches] == [[4], [4], [2]]
    assert [batch.positions.tolist() for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [batch.sample_rows.tolist() for batch in batches] == [[], [], [0]]
    assert [len(batch.new_requests) for batch in batches] == [1, 0, 0]
    assert request.state is RequestState.DECODE


def test_every_array_is_int32() -> None:
    _, batch = two_decodes_and_two_prefills()
    arrays = {f.name: getattr(batch, f.name) for f in fields(batch) if isinstance(getattr(batch, f.name), np.ndarray)}
    assert len(arrays) == 12
    assert {name: array.dtype for name, array in arrays.items()} == dict.fromkeys(arrays, np.dtype(np.int32))


@pytest.mark.parametrize("cache", ["radix", "block-hash", "none"])
def test_the_changes_of_all_batches_add_up_to_the_page_table(cache: str) -> None:
    """An executor that applies them has, for each row of each batch, the pages that the scheduler means."""
    harness = Harness(prefix_cache=cache, page_size=2, num_pages=24, max_prefill_tokens=5, batch_policy="mixed")
    for i in range(20):
        harness.add([i % 2] * (1 + i % 9), max_tokens=2 + i % 7)
    while harness.scheduler.has_work:
        harness.step()
        for slot in harness.table.slots.tolist():
            pages = harness.memory.row(slot)
            assert harness.executor.page_table[slot, : len(pages)].tolist() == pages.tolist()


def test_changes_are_sent_once() -> None:
    harness = Harness(page_size=4, prefix_cache="none")
    harness.add([0] * 5, max_tokens=9)
    while harness.scheduler.has_work:
        harness.step()
    changed = [len(batch.page_index) for batch in harness.batches]
    # Two pages with the prompt, a third for position 8, a fourth for position 12.
    assert changed == [2, 0, 0, 0, 1, 0, 0, 0, 1]


@pytest.mark.parametrize("composition", ["prefill-first", "mixed", "static"])
def test_rows_are_in_order_of_arrival_decodes_first(composition: str) -> None:
    harness = Harness(batch_policy=composition, num_pages=24, page_size=2, max_prefill_tokens=6, max_running=5)
    for i in range(25):
        harness.add([i % 3] * (1 + i % 6), max_tokens=1 + i % 8)
    batches = 0
    while harness.scheduler.has_work:
        batch = harness.scheduler.schedule()
        if batch is None:
            continue
        batches += 1
        arrival = harness.table.arrival[batch.slots].tolist()
        decodes, prefills = arrival[: batch.num_decode], arrival[batch.num_decode :]
        assert decodes == sorted(decodes)
        assert prefills == sorted(prefills)
        assert (batch.q_lens[: batch.num_decode] == 1).all()
        assert len(set(batch.slots.tolist())) == batch.num_rows
        harness.scheduler.process(batch, harness.executor.launch(batch).wait())
    assert batches > 20


def test_the_same_requests_give_the_same_batches() -> None:
    """Nothing depends on addresses, hashes or the clock, so every rank of a group composes the same steps."""

    def batches() -> list[Batch]:
        harness = Harness(
            queue_policy="lpm", batch_policy="mixed", num_pages=20, page_size=2, max_prefill_tokens=6, max_running=5
        )
        requests = [harness.add([i % 3] * (1 + i % 6), max_tokens=1 + i % 8) for i in range(25)]
        for i in range(5):
            harness.step()
            harness.abort(requests[2 * i])
        harness.run()
        return harness.batches

    first, second = batches(), batches()
    assert len(first) == len(second) > 20
    for a, b in zip(first, second, strict=True):
        for f in fields(a):
            if isinstance(getattr(a, f.name), np.ndarray):
                assert np.array_equal(getattr(a, f.name), getattr(b, f.name)), f.name


def test_nothing_to_do_is_no_batch() -> None:
    harness = Harness()
    assert harness.scheduler.schedule() is None
    assert not harness.scheduler.has_work
    harness.add([1, 2], max_tokens=1)
    assert harness.scheduler.has_work
    harness.run()
    assert harness.scheduler.schedule() is None
