from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minisgl.viz import (
    Picture,
    Transfer,
    one_shot_all_reduce,
    reduce_player,
    reduce_schedule,
    ring_all_reduce,
    two_shot_all_reduce,
)
from minisgl.viz.svg import _PALETTE
from tests.viz.drawing import SVG, assert_sound, boxes, texts


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
    assert made.headings[1] == "2 of 7: 4 messages of 1.00 KiB each; whoever gets one adds it"
    assert made.headings[-1] == "7 of 7: 4 messages of 1.00 KiB each; whoever gets one takes it"
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
    assert caption == "2 of 3: 2 messages of 1 byte to 2 bytes each; whoever gets one adds it"
