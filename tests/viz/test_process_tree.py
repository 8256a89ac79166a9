from __future__ import annotations

from xml.etree import ElementTree

import pytest

from minisgl.errors import ConfigError
from minisgl.viz import Notice, Picture, ProcessState, QueueState, process_tree
from minisgl.viz.svg import _PALETTE
from tests.viz.drawing import SVG, assert_sound, boxes, texts

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
