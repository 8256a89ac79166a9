from __future__ import annotations

from itertools import pairwise

import pytest

from minisgl.book import Message, ProcessState, message_sequence, process_tree
from minisgl.book.svg import _PALETTE
from minisgl.errors import ConfigError
from tests.book.drawing import assert_sound, boxes, texts
from tests.book.test_collectives import arrows

# -- process tree ----------------------------------------------------------------------------------------------------

PROCESSES = [
    ProcessState("API", 100, "a request"),
    ProcessState("scheduler", 101, "step 3", "API"),
    ProcessState("rank 1", 102, "a step", "scheduler"),
    ProcessState("detokenizer", 103, "tokens", "API", ended="killed by SIGKILL"),
]


def test_each_process_has_its_pid_its_wait_and_its_parent() -> None:
    picture = process_tree(PROCESSES)
    assert_sound(picture)
    found = texts(picture)
    assert "Processes: 3 alive, 1 dead" in found
    assert {"API", "pid 100", "waits for a request", "rank 1", "pid 102", "dead: killed by SIGKILL"} <= set(found)
    assert "waits for tokens" not in found
    lefts = [float(box.get("x", "")) for box in boxes(picture)]
    assert lefts[0] < lefts[1] == lefts[3] < lefts[2], "children are indented"
    assert "rank 1, pid 102, started by scheduler: waits for a step." in picture.text
    assert "detokenizer, pid 103, started by API: dead: killed by SIGKILL." in picture.text
    assert [box.get("fill") for box in boxes(picture)] == [None, None, None, _PALETTE[5][0]]


def test_many_processes_stay_on_the_card() -> None:
    names = [f"process number {n} " * 3 for n in range(12)]
    parents = ["", *names]
    assert_sound(process_tree([ProcessState(name, 9, "w" * 200, up) for name, up in zip(names, parents, strict=False)]))
    assert_sound(process_tree([]))


@pytest.mark.parametrize("processes", [PROCESSES[:1] * 2, PROCESSES[1:]])
def test_names_are_given_once_and_parents_first(processes: list[ProcessState]) -> None:
    with pytest.raises(ConfigError, match="give each name once"):
        process_tree(processes)


# -- message sequence ------------------------------------------------------------------------------------------------

LIFE = [
    Message(10.0, "client", "API", "POST", "stream=true"),
    Message(10.0005, "API", "tokenizer", "Submit", "job 7"),
    Message(10.002, "tokenizer", "scheduler", "Tokenized", "41 tokens"),
    Message(10.02, "scheduler", "detokenizer", "Progress"),
    Message(10.021, "detokenizer", "API", "Update", "text '<b>&'"),
]


def test_a_lane_for_each_process_and_an_arrow_between_them_for_each_message() -> None:
    picture = message_sequence(LIFE)
    assert_sound(picture)
    found = texts(picture)
    lanes = ["client", "API", "tokenizer", "scheduler", "detokenizer"]
    assert found[:6] == ["5 messages in 21.00 ms", *lanes]
    middles = [float(box.get("x", "")) + float(box.get("width", "")) / 2 for box in boxes(picture)]
    assert middles == sorted(middles)
    drawn = arrows(picture)
    assert [x for _, x, _ in drawn] == pytest.approx([middles[lanes.index(each.destination)] for each in LIFE], abs=0.1)
    assert [fill for fill, _, _ in drawn] == [_PALETTE[lanes.index(each.source)][0] for each in LIFE]
    assert all(above[2] < below[2] for above, below in pairwise(drawn)), "later is lower"
    assert found[6:12] == ["POST", "stream=true", "0 µs", "Submit", "job 7", "500 µs"]
    assert "text '<b>&'" in found
    assert "At 2.00 ms: tokenizer to scheduler: Tokenized (41 tokens)." in picture.text


def test_messages_come_in_order_of_time() -> None:
    assert message_sequence(LIFE[::-1]).svg == message_sequence(LIFE).svg


def test_of_very_many_the_last_are_counted() -> None:
    picture = message_sequence([Message(number, "a", "b", f"kind{number}") for number in range(100)])
    assert_sound(picture)
    assert len(arrows(picture)) == 60
    assert "… and 40 messages more" in texts(picture)


def test_names_that_have_no_room_beside_each_other_stand_in_two_rows() -> None:
    names = [f"scheduler rank {number}" for number in range(6)]
    picture = message_sequence([Message(0, a, b, "hello") for a, b in pairwise(names)])
    assert_sound(picture)
    assert [text for text in texts(picture) if text.startswith("scheduler")] == names
    heads = boxes(picture)
    assert len({box.get("y") for box in heads}) == 2
    for row in (heads[::2], heads[1::2]):
        for left, right in pairwise(row):
            assert float(left.get("x", "")) + float(left.get("width", "")) <= float(right.get("x", ""))


def test_long_and_odd_texts() -> None:
    odd = Message(0, "a", "a", "k" * 100, "s\x00\ud800" + "t" * 100)
    picture = message_sequence([odd])
    assert_sound(picture)
    assert "s\ufffd\ufffd" in picture.text


def test_no_messages() -> None:
    picture = message_sequence([])
    assert_sound(picture)
    assert texts(picture) == ["0 messages"]
