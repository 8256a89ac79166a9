from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest

from minisgl.errors import ConfigError
from minisgl.viz import Transfer, one_shot_all_reduce, partial_sums, ring_all_reduce, two_shot_all_reduce
from minisgl.viz.transfers import turns

Schedule = Callable[[int, int], list[Transfer]]
ALL: list[Schedule] = [ring_all_reduce, one_shot_all_reduce, two_shot_all_reduce]
NBYTES = 10_243


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ALL)
def test_every_rank_ends_with_every_ranks_numbers_once(schedule: Schedule, ranks: int) -> None:
    *_, last = partial_sums(schedule(ranks, NBYTES))
    assert len(last) == ranks
    for row in last:
        assert row == [Counter(range(ranks))] * len(row)


@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", ALL)
def test_no_turn_can_be_left_out(schedule: Schedule, ranks: int) -> None:
    transfers = schedule(ranks, NBYTES)
    for missing in transfers:
        *_, last = partial_sums([transfer for transfer in transfers if transfer is not missing])
        assert any(parts != Counter(range(ranks)) for row in last for parts in row)


@pytest.mark.parametrize(
    ("schedule", "num_turns", "shares"),
    [(ring_all_reduce, 6, 1.5), (one_shot_all_reduce, 1, 3.0), (two_shot_all_reduce, 2, 1.5)],
)
def test_turns_and_bytes_of_four_ranks(schedule: Schedule, num_turns: int, shares: float) -> None:
    transfers = schedule(4, 1000)
    sent: Counter[int] = Counter()
    for transfer in transfers:
        sent[transfer.source] += transfer.nbytes
    assert len(turns(transfers)) == num_turns
    assert set(sent.values()) == {shares * 1000}


def test_in_a_ring_everybody_sends_to_the_next_one_only() -> None:
    for turn in turns(ring_all_reduce(5, NBYTES)):
        assert [(each.source, each.destination) for each in turn] == [(rank, (rank + 1) % 5) for rank in range(5)]


def test_chunks_are_the_whole_together() -> None:
    sizes = {each.chunk: each.nbytes for each in two_shot_all_reduce(4, NBYTES)}
    assert sum(sizes.values()) == NBYTES
    assert max(sizes.values()) - min(sizes.values()) <= 1


def test_in_a_turn_all_is_sent_before_anything_is_received() -> None:
    swap = [Transfer(0.5, 0, 1, None, 8, "take"), Transfer(0.5, 1, 0, None, 8, "take")]
    before, after = partial_sums(swap)
    assert before == [[Counter([0])], [Counter([1])]]
    assert after == [[Counter([1])], [Counter([0])]]


def test_recorded_times_put_the_messages_in_order() -> None:
    recorded = [Transfer(2.5, 1, 2, 0, 8, "take"), Transfer(1.25, 0, 1, 0, 8, "add")]
    *_, last = partial_sums(recorded)
    assert last[2] == [Counter([0, 1])]


def test_a_schedule_that_adds_twice_shows_it() -> None:
    *_, last = partial_sums([Transfer(0, 0, 1, 0, 8, "add"), Transfer(1, 0, 1, 0, 8, "add")])
    assert last[1] == [Counter({0: 2, 1: 1})]


@pytest.mark.parametrize("kinds", [("take", "add"), ("add", "take"), ("take", "take")])
def test_nobody_can_take_two_things_at_once(kinds: tuple[str, str]) -> None:
    transfers = [Transfer(0, source, 2, 1, 8, kind) for source, kind in enumerate(kinds)]
    with pytest.raises(ConfigError, match="rank 2 takes chunk 1"):
        list(partial_sums(transfers))


@pytest.mark.parametrize("schedule", ALL)
@pytest.mark.parametrize(("ranks", "nbytes"), [(1, 8), (4, 0)])
def test_too_few(schedule: Schedule, ranks: int, nbytes: int) -> None:
    with pytest.raises(ConfigError, match=f"not {ranks} and {nbytes}"):
        schedule(ranks, nbytes)


@pytest.mark.parametrize(("source", "destination", "chunk"), [(1, 1, 0), (-1, 0, 0), (0, 1, -1)])
def test_bad_transfers(source: int, destination: int, chunk: int) -> None:
    with pytest.raises(ConfigError, match="from one rank to another"):
        Transfer(0, source, destination, chunk, 8, "add")
