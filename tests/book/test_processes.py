from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

import pytest

from minisgl.book import (
    Message,
    Notice,
    Picture,
    ProcessState,
    QueueState,
    message_player,
    message_sequence,
    process_tree,
)
from minisgl.book.svg import _PALETTE
from minisgl.errors import ConfigError
from tests.book.drawing import SVG, assert_sound, boxes, texts
from tests.book.test_collectives import arrows

# -- process tree ----------------------------------------------------------------------------------------------------

PROCESSES = [
    ProcessState("API", 100, "a request"),
    ProcessState("scheduler", 101, "step 3", "API"),
    ProcessState("rank 1", 102, "a step", "scheduler"),
    ProcessState("detokenizer", 103, "tokens", "API", ended="killed by SIGKILL"),
]
QUEUES = [
    QueueState("scheduler", "detokenizer", "Progress", 16, 32, 64),
    QueueState("detokenizer", "API", "Update", 0, 9, 64),
    QueueState("detokenizer", "scheduler", "Stop", 0, 0, None),
]


def process_boxes(picture: Picture) -> list[tuple[float, float]]:
    return [(float(box.get("x", "")), float(box.get("y", ""))) for box in boxes(picture) if box.get("height") == "46"]


def test_each_process_has_its_pid_its_wait_and_its_parent() -> None:
    picture = process_tree(PROCESSES)
    assert_sound(picture)
    found = texts(picture)
    assert "Processes: 3 alive, 1 dead" in found
    assert {"API", "pid 100", "waits for a request", "rank 1", "pid 102", "dead: killed by SIGKILL"} <= set(found)
    assert "waits for tokens" not in found
    assert not any(text.startswith("number: queue") for text in found), "there is no number to explain"
    lefts = [x for x, _ in process_boxes(picture)]
    assert lefts[0] < lefts[1] == lefts[3] < lefts[2], "children are indented"
    assert "rank 1, pid 102, started by scheduler: waits for a step." in picture.text
    assert "detokenizer, pid 103, started by API: dead: killed by SIGKILL." in picture.text
    dead = [box for box in boxes(picture) if box.get("fill") == _PALETTE[5][0]]
    assert len(dead) == 1


def test_a_queue_is_a_line_from_process_to_process_and_a_meter() -> None:
    picture = process_tree(PROCESSES, QUEUES)
    assert_sound(picture)
    found = texts(picture)
    assert {"scheduler → detokenizer: Progress", "16 now, 32 at most, bound 64", "0 now, 0 at most, no bound"} <= set(
        found
    )
    tops = [y for _, y in process_boxes(picture)]
    wires = [path.get("d", "") for path in ElementTree.fromstring(picture.svg).iter(f"{SVG}path") if path.get("style")]
    assert len(wires) == 3
    for wire, (source, destination) in zip(wires, [(1, 3), (3, 0), (3, 1)], strict=True):
        start = float(wire.partition(" ")[2].partition("H")[0])
        end = float(wire.partition("V")[2].partition("H")[0])
        assert tops[source] < start < tops[source] + 46
        assert tops[destination] < end < tops[destination] + 46
    meters = [float(box.get("width", "")) for box in boxes(picture) if box.get("height") == "15"]
    assert meters == [180, 45, 180, 180], "an outline each, and a quarter of the first is full"
    assert "Queue 1, scheduler → detokenizer: Progress: 16 now, 32 at most, bound 64." in picture.text


def test_after_a_fault_it_says_who_was_told_what_and_when() -> None:
    notices = [
        Notice(1.5, "API", "all processes", "SIGTERM"),
        Notice(0.002, "API", "3 <clients>", "EngineDead: " + "the detokenizer was killed " * 6),
    ]
    picture = process_tree(PROCESSES, QUEUES, notices)
    assert_sound(picture)
    found = texts(picture)
    assert found.index("2.00 ms") < found.index("1.50 s")
    assert any(text.startswith("API → 3 <clients>: EngineDead: the detokenizer") for text in found)
    assert " ".join(found).count("was killed") == 6, "a long text is broken, not cut"
    assert "After 1.50 s API → all processes: SIGTERM." in picture.text


def test_many_processes_and_queues_stay_on_the_card() -> None:
    many = [
        ProcessState(f"process number {n} " * 3, n, "w" * 200, f"process number {n - 1} " * 3 * (n > 0))
        for n in range(12)
    ]
    names = [process.name for process in many]
    queues = [QueueState(a, b, "Kind" * 20, 5, 10, 1 << 40) for a in names for b in names[:3]]
    assert_sound(process_tree(many, queues))
    assert_sound(process_tree([]))


@pytest.mark.parametrize(
    "queue",
    [
        QueueState("API", "nobody", "x", 0, 0, 1),
        QueueState("API", "rank 1", "x", 2, 1, 4),
        QueueState("API", "rank 1", "x", -1, 1, 4),
    ],
)
def test_queues_that_cannot_be(queue: QueueState) -> None:
    with pytest.raises(ConfigError, match="its ends must be of API, scheduler"):
        process_tree(PROCESSES, [queue])


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


def test_the_player_adds_one_message_a_frame_and_colours_the_newest() -> None:
    made = message_player(LIFE)
    assert len(made.frames) == 5
    assert [len(arrows(frame)) for frame in made.frames] == [1, 2, 3, 4, 5]
    assert len({frame.height for frame in made.frames}) == 1, "the page does not jump"
    for number, frame in enumerate(made.frames):
        assert_sound(frame)
        coloured = [fill for fill, _, _ in arrows(frame)]
        assert coloured[:-1] == [""] * number
        assert coloured[-1]
        heads = [box for box in boxes(frame) if box.get("fill")]
        assert len(heads) == 2, "those that talk"
    assert made.headings[1] == "2 of 5: API to tokenizer: Submit (job 7)"


def test_the_player_moves_a_window_over_many_messages() -> None:
    many = [Message(number, "a", "b", f"kind{number}") for number in range(30)]
    frame = message_player(many).frames[20]
    kinds = [text for text in texts(frame) if text.startswith("kind")]
    assert kinds == [f"kind{number}" for number in range(11, 21)]
    for each in message_player(many).frames:
        assert_sound(each)


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
    for each in message_player([odd]).frames:
        assert_sound(each)


def test_no_messages() -> None:
    picture = message_sequence([])
    assert_sound(picture)
    assert texts(picture) == ["0 messages"]
    with pytest.raises(ValueError, match="0 frames"):
        message_player([])
