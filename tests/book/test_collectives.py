from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from minisgl.book import (
    Picture,
    Transfer,
    break_evens,
    collective_costs,
    one_shot_all_reduce,
    partial_sums,
    reduce_player,
    reduce_schedule,
    ring_all_reduce,
    two_shot_all_reduce,
)
from minisgl.book.collectives import turns
from minisgl.book.svg import _PALETTE
from minisgl.errors import ConfigError
from tests.book.drawing import SVG, assert_sound, boxes, texts
from tests.book.test_charts import dots_of

# -- transfers -------------------------------------------------------------------------------------------------------

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


# -- reduce pictures -------------------------------------------------------------------------------------------------


def arrows(picture: Picture) -> list[tuple[str, float, float]]:
    """Colour, and where the tip is: the fourth of seven corners."""
    found = []
    for path in ElementTree.fromstring(picture.svg).iter(f"{SVG}path"):
        corners = path.get("d", "")[1:-1].split("L")
        if len(corners) == 7:
            x, y = corners[3].split()
            found.append((path.get("fill", ""), float(x), float(y)))
    return found


def test_a_schedule_has_an_arrow_from_line_to_line_for_each_message() -> None:
    ring = ring_all_reduce(4, 4096)
    picture = reduce_schedule({"ring": ring})
    assert_sound(picture)
    lanes = [float(box.get("y", "")) + 10 for box in boxes(picture) if box.get("fill") and box.get("width") == "56"]
    assert len(lanes) == 4
    drawn = arrows(picture)
    assert [(fill, y) for fill, _, y in drawn] == [(_PALETTE[each.source][0], lanes[each.destination]) for each in ring]
    ends = [x for _, x, _ in drawn]
    assert ends == sorted(ends)
    assert len(set(ends)) == 6, "time goes to the right, one column a turn"


def test_schedules_on_one_scale_with_their_turns_and_bytes() -> None:
    schedules = {"ring": ring_all_reduce(4, 4096), "one-shot": one_shot_all_reduce(4, 4096)}
    picture = reduce_schedule(schedules)
    assert_sound(picture)
    found = texts(picture)
    assert "ring: 6 turns, a rank sends 6.00 KiB" in found
    assert "one-shot: 1 turn, a rank sends 12.00 KiB" in found
    assert found.count("1: add") == 2
    ring, one_shot = arrows(picture)[:24], arrows(picture)[24:]
    assert len(one_shot) == 12
    assert {x for _, x, _ in one_shot} == {ring[0][1]}, "a turn is equally wide in both"
    assert "Turn 4: 0 to 1 chunk 1 to take, 1 to 2 chunk 2 to take" in picture.text
    assert "Turn 1: 0 to 1 to add, 0 to 2 to add" in picture.text


def test_the_chunk_of_each_message_is_written_where_each_rank_sends_one() -> None:
    found = texts(reduce_schedule({"ring": ring_all_reduce(3, 4096)}))
    assert [text for text in found if text in ("0", "1", "2")] == [str(each.chunk) for each in ring_all_reduce(3, 4096)]


@pytest.mark.parametrize("ranks", [2, 8, 16])
def test_many_ranks_stay_on_the_card(ranks: int) -> None:
    schedules = {"ring": ring_all_reduce(ranks, 4096), "two-shot": two_shot_all_reduce(ranks, 4096)}
    assert_sound(reduce_schedule(schedules))
    for transfers in schedules.values():
        for frame in reduce_player(transfers).frames[::7]:
            assert_sound(frame)


def test_the_player_shows_the_messages_of_a_turn_and_what_they_left() -> None:
    made = reduce_player(ring_all_reduce(4, 4096), "ring")
    assert len(made.frames) == 7
    assert [len(arrows(frame)) for frame in made.frames] == [0, 4, 4, 4, 4, 4, 4]
    first, second, last = made.frames[0], made.frames[1], made.frames[-1]
    assert made.headings[0] == "1 of 7: every rank has its own numbers only"
    assert made.headings[1] == "2 of 7: 4 messages of 1.00 KiB each; the receiver adds it"
    assert made.headings[-1] == "7 of 7: 4 messages of 1.00 KiB each; the receiver takes it"
    assert "Rank 1 has 1, 1, 1, 1." in first.text
    assert "Messages: 0 to 1 chunk 0 to add, 1 to 2 chunk 1 to add" in second.text
    assert "Rank 1 has 0+1, 1, 1, 1." in second.text
    assert texts(second).count("1.00 KiB") == 4
    assert texts(last).count("6.00 KiB") == 4
    assert last.text.count("the sum") == 16


def test_a_sum_is_framed_when_it_is_complete_and_not_when_it_counts_somebody_twice() -> None:
    wrong = [Transfer(0, 0, 1, 0, 8, "add"), Transfer(1, 0, 1, 0, 8, "add")]
    frames = reduce_player(wrong).frames

    def framed(picture: Picture) -> int:
        return sum('viz-line"' in line for line in picture.svg.split("<path"))

    assert [framed(frame) for frame in frames] == [0, 1, 0]
    assert "2×" in texts(frames[2])
    assert "Rank 1 has 0+0+1." in frames[2].text


def test_messages_of_different_sizes() -> None:
    caption = reduce_player(two_shot_all_reduce(2, 3)).headings[1]
    assert caption == "2 of 3: 2 messages of 1 byte to 2 bytes each; the receiver adds it"


# -- collective costs ------------------------------------------------------------------------------------------------

KIB = 1024
ONE_SHOT = [("one-shot", KIB * size, float(size)) for size in (1, 10, 100)]
TWO_SHOT = [("two-shot", KIB * size, 10.0) for size in (1, 100)]
NCCL = [("NCCL", KIB * size, 20.0) for size in (1, 1000)]


def test_break_even_is_where_the_lines_cross_on_logarithmic_axes() -> None:
    costs = [("a", 100, 1.0), ("a", 10_000, 100.0), ("b", 100, 10.0), ("b", 10_000, 10.0)]
    (found,) = break_evens(costs)
    assert (found.below, found.above) == ("a", "b")
    assert found.nbytes == pytest.approx(1000)
    assert found.microseconds == pytest.approx(10)


def test_only_the_fastest_count() -> None:
    assert [(each.below, each.above) for each in break_evens([*ONE_SHOT, *TWO_SHOT, *NCCL])] == [
        ("one-shot", "two-shot")
    ]


def test_several_between_two_measured_sizes_come_in_order() -> None:
    costs = [
        ("a", 1, 1.0),
        ("a", 10**6, 10.0**6),
        ("b", 1, 10.0),
        ("b", 10**6, 10.0**3),
        ("c", 1, 80.0),
        ("c", 10**6, 80.0),
    ]
    found = break_evens(costs)
    assert [(each.below, each.above) for each in found] == [("a", "b"), ("b", "c")]
    assert found[0].nbytes == pytest.approx(10**1.5)
    assert found[1].microseconds == pytest.approx(80)


def test_a_crossing_at_a_measured_size_counts_once() -> None:
    costs = [("a", 1, 1.0), ("a", 10, 10.0), ("a", 100, 100.0), ("b", 1, 10.0), ("b", 10, 10.0), ("b", 100, 10.0)]
    (found,) = break_evens(costs)
    assert found.nbytes == pytest.approx(10)


def test_sizes_that_only_another_method_was_measured_at_lie_on_a_straight_line() -> None:
    (found,) = break_evens([("a", 1, 1.0), ("a", 10**4, 100.0), ("b", 1, 20.0), ("b", 100, 5.0), ("b", 10**4, 5.0)])
    assert found.nbytes == pytest.approx(100 ** (math.log(20) / math.log(40)))


def test_nothing_is_claimed_where_a_method_was_not_measured() -> None:
    assert break_evens([*ONE_SHOT, ("other", 50 * KIB, 1.0), ("other", 1000 * KIB, 1.0)]) == []
    assert break_evens(ONE_SHOT[:1]) == []


def test_a_line_with_dots_for_each_method_and_a_mark_for_each_break_even() -> None:
    costs = [*ONE_SHOT, *TWO_SHOT, *NCCL]
    picture = collective_costs(costs, "All-reduce <4>")
    assert_sound(picture)
    assert len(dots_of(picture)) == len(costs)
    found = texts(picture)
    assert {"All-reduce <4>", "one-shot", "two-shot", "NCCL", "µs", "KiB of the message"} <= set(found)
    assert "from 10.00 KiB on: two-shot, no longer one-shot" in found
    assert "1. one-shot: 1 → 1, 10 → 10, 100 → 100." in picture.text
    assert collective_costs(costs[::-1], "t").text.splitlines()[3] == "3. one-shot: 1 → 1, 10 → 10, 100 → 100."


def test_hundreds_of_megabytes_stay_on_the_card() -> None:
    assert_sound(collective_costs([("NCCL", 10, 1.0), ("NCCL", 800 * 2**20, 10.0**5)], "All-reduce"))


@pytest.mark.parametrize("bad", [("a", 0, 1.0), ("a", 8, 0.0), ("one-shot", KIB, 3.0)])
def test_bad_rows(bad: tuple[str, int, float]) -> None:
    with pytest.raises(ConfigError, match=f"costs of '{bad[0]}': {bad[1]} bytes"):
        collective_costs([*ONE_SHOT, bad], "t")
