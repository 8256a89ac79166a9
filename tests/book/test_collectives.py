from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from xml.etree import ElementTree

import pytest

from minisgl.book import (
    Picture,
    Transfer,
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
