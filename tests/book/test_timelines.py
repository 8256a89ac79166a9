from __future__ import annotations

import re
from typing import Any

import pytest

from minisgl.book import (
    Picture,
    host_device_timeline,
    kernel_timeline,
    launch_lanes,
    schedule_player,
    schedule_timeline,
)
from minisgl.book.svg import WIDTH
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.trace import DEVICE, HOST, REQUESTS, Event, Trace
from tests.book.drawing import assert_sound, boxes, texts
from tests.tiny_text_model import text_checkpoint

# -- timelines -------------------------------------------------------------------------------------------------------

MICROSECOND = 1e-6


class FakeTrace(Trace):
    """A trace of given events."""

    def __init__(self, *events: Event) -> None:
        super().__init__()
        self.given = list(events)

    @property
    def events(self) -> list[Event]:
        return sorted(self.given, key=lambda event: event.start)


def launch(step: int, decode: int, **rows: tuple[int, int]) -> Event:
    """A step that feeds (tokens, on top of cached ones) for ``r0``, ``r1``, …"""
    fed, cached = zip(*rows.values(), strict=True)
    uids = [int(name[1:]) for name in rows]
    args = {"step": step, "decode": decode, "uids": uids, "fed": list(fed), "cached": list(cached)}
    return Event("launch", HOST, float(step), 0.5, args)


def instant(name: str, at: float, **args: Any) -> Event:
    return Event(name, REQUESTS, at, None, args)


@pytest.fixture
def schedule() -> FakeTrace:
    """Request 0 runs to its end; 1 is prefilled in two chunks, preempted, and computed again; 2 never ends."""
    return FakeTrace(
        launch(0, 0, r0=(5, 0), r1=(3, 2)),
        launch(1, 0, r1=(4, 5)),
        launch(2, 2, r0=(1, 5), r1=(1, 9)),
        instant("preempt", 2.9, uid=1),
        launch(3, 1, r0=(1, 6)),
        instant("finish", 3.6, uid=0, reason="stop"),
        launch(4, 0, r2=(7, 0)),
        launch(5, 0, r1=(10, 0)),
        instant("finish", 5.6, uid=1, reason="length"),
    )


def columns(picture: Picture, step_width: float = 44.0) -> list[tuple[float, float]]:
    """(first step, steps) of each box; boxes leave a pixel free at both sides."""
    return [
        ((float(box.get("x", "")) - 67) / step_width, (float(box.get("width", "")) + 2) / step_width)
        for box in boxes(picture)
    ]


def test_a_schedule_has_a_box_for_each_chunk_and_for_each_run_of_decodes(schedule: Trace) -> None:
    picture = schedule_timeline(schedule)
    assert columns(picture) == [(2, 2), (0, 1), (2, 1), (0, 1), (1, 1), (5, 1), (4, 1)]
    heights = [box.get("height") for box in boxes(picture)]
    assert heights == ["12", "26", "12", "26", "26", "26", "26"], "decodes are flat"
    found = texts(picture)
    start = found.index("r0")
    assert found[start:] == ["r0", "5", "stop", "r1", "3", "4", "10", "×", "length", "r2", "7", "not finished"]
    assert found[:2] == ["Schedule: 3 requests, 6 steps", found[1]]
    assert found[found.index("ends with") + 1 : start] == ["0", "1", "2", "3", "4", "5"]
    assert picture.svg.count("viz-dashed") == 2, "in the style sheet, and from the preemption to the new start"
    assert_sound(picture)


def test_a_schedule_in_words(schedule: Trace) -> None:
    assert schedule_timeline(schedule).text.splitlines() == [
        "Schedule: 3 requests, 6 steps.",
        "Request r0 prefills 5 tokens on top of 0 in step 0, decodes in step 2 to 3, finishes: stop.",
        "Request r1 prefills 3 tokens on top of 2 in step 0, prefills 4 tokens on top of 5 in step 1, "
        "prefills 10 tokens on top of 0 in step 5, decodes in step 2, is preempted before step 3, finishes: length.",
        "Request r2 prefills 7 tokens on top of 0 in step 4, is not finished.",
    ]


def test_a_schedule_step_by_step(schedule: Trace) -> None:
    made = schedule_player(schedule)
    assert made.headings == [
        "1 of 6: step 0: r0 prefills 5; r1 prefills 3 on top of 2",
        "2 of 6: step 1: r1 prefills 4 on top of 5",
        "3 of 6: step 2: r0 r1 decode",
        "4 of 6: step 3: r1 preempted; r0 decode; r0 ends with stop",
        "5 of 6: step 4: r2 prefills 7",
        "6 of 6: step 5: r1 prefills 10; r1 ends with length",
    ]
    assert [len(boxes(frame)) for frame in made.frames] == [2, 3, 5, 5, 6, 7]
    assert [texts(frame).count("not finished") for frame in made.frames] == [3, 3, 3, 2, 2, 1]
    assert [texts(frame).count("×") for frame in made.frames] == [0, 0, 0, 1, 1, 1]
    assert made.frames[-1] == schedule_timeline(schedule)
    assert {frame.height for frame in made.frames} == {made.frames[0].height}
    for frame in made.frames:
        assert_sound(frame)


def waits(picture: Picture, step_width: float = 44.0) -> list[tuple[float, float]]:
    """(first step, end) of each dashed line; it leaves room for the × before it."""
    return [
        ((float(x) - 12 - 66) / step_width, (float(end) - 66) / step_width)
        for x, end in re.findall(r'd="M([\d.]+) [\d.]+H([\d.]+)" class="viz-line viz-dashed"', picture.svg)
    ]


def test_whoever_is_preempted_is_seen_to_wait_until_it_goes_on_or_ends(schedule: FakeTrace) -> None:
    frames = schedule_player(schedule).frames
    assert [waits(frame) for frame in frames] == [[], [], [], [(3, 4)], [(3, 5)], [(3, 5)]]
    left = schedule.given[:-2]
    assert waits(schedule_timeline(FakeTrace(*left))) == [(3, 5)], "it has not gone on yet"
    aborted = instant("finish", 3.7, uid=1, reason="abort")
    assert waits(schedule_timeline(FakeTrace(*left, aborted))) == [(3, 4)]


def test_a_long_schedule_is_stepped_through_in_strides() -> None:
    made = schedule_player(FakeTrace(*(launch(step, 1, r0=(1, step)) for step in range(150))))
    assert [heading.split(": ")[1] for heading in made.headings] == [f"step {step}" for step in range(0, 150, 3)]


def test_no_schedule() -> None:
    assert schedule_timeline(FakeTrace()).text == "Schedule: 0 requests, 0 steps."
    assert_sound(schedule_timeline(FakeTrace()))


def test_a_long_schedule_stays_on_its_card() -> None:
    steps = [launch(step, 1, **{f"r{step % 40}": (1, 9), "r99": (512, step)}) for step in range(700)]
    picture = schedule_timeline(FakeTrace(*steps))
    assert_sound(picture)
    assert "512" not in texts(picture), "no room for a number"
    assert "prefills 512 tokens on top of 699 in step 699" in picture.text


@pytest.mark.parametrize("overlap", [False, True])
def test_the_schedule_of_an_engine(tmp_path: Any, overlap: bool) -> None:
    llm = LLM(text_checkpoint(tmp_path), page_size=4, num_pages=8, device="cpu", overlap=overlap, max_prefill_tokens=8)
    params = SamplingParams(max_tokens=14, ignore_eos=True, seed=1)
    with llm.trace() as trace:
        outputs = llm.generate([[1] * 5, [2] * 5, [3] * 5], params)
    picture = schedule_timeline(trace)
    preemptions = sum(output.metrics.preemptions for output in outputs)
    assert preemptions > 0
    assert texts(picture).count("×") == picture.text.count("preempted before step") == preemptions
    assert texts(picture).count("length") == 3
    assert_sound(picture)
    timeline = host_device_timeline(trace, 2, 3)
    assert timeline.text.count("on the device at") == timeline.text.count("schedule at") == 3
    assert [line.split(":")[0] for line in timeline.text.splitlines()[1:]] == ["Step 2", "Step 3", "Step 4"]
    assert_sound(timeline)


@pytest.fixture
def overlapped() -> Trace:
    """Eight steps of a millisecond; the host works on each for 330 µs and waits for the rest."""
    events = []
    for step in range(8):
        for name, track, first, last in (
            ("schedule", HOST, 0, 80),
            ("launch", HOST, 80, 300),
            ("decode", DEVICE, 1200, 2190),
            ("wait", HOST, 1300, 2200),
            ("process", HOST, 2200, 2230),
        ):
            start = (1000 * step + first) * MICROSECOND
            events.append(Event(name, track, 50 + start, (last - first) * MICROSECOND, {"step": step}))
    events.append(Event("schedule", HOST, 50 + 8000 * MICROSECOND, MICROSECOND, {}))
    events.append(instant("finish", 50.0, uid=0, reason="stop"))
    return FakeTrace(*events)


def test_spans_lie_in_time_and_in_lanes(overlapped: Trace) -> None:
    picture = host_device_timeline(overlapped, 2, 3)
    drawn = boxes(picture)
    assert len(drawn) == 5 * 3
    lanes = [float(box.get("y", "")) for box in drawn]
    assert lanes == sorted(lanes)
    assert len(set(lanes)) == 5
    scale = (760 - 28 - 76 - 84) / 4230
    starts = [(float(box.get("x", "")) - 90) / scale for box in drawn]
    assert starts[:3] == pytest.approx([0, 1000, 2000], abs=1)
    assert starts[-3:] == pytest.approx([1200, 2200, 3200], abs=1)
    assert float(drawn[-1].get("width", "")) == pytest.approx(990 * scale - 0.5, abs=0.1)
    assert_sound(picture)


def test_lanes_have_their_names_their_medians_and_the_numbers_of_their_steps(overlapped: Trace) -> None:
    found = texts(host_device_timeline(overlapped, 2, 3))
    assert found[:3] == ["Host and device, 3 steps from step 2", "4.23 ms", "median"]
    assert found[3:8] == ["0 ms", "0.5 ms", "1 ms", "1.5 ms", "2 ms"]
    for lane, time in (("schedule", "80 µs"), ("launch", "220 µs"), ("wait", "900 µs"), ("process", "30 µs")):
        start = found.index(lane)
        assert found[start : start + 5] == [lane, time, "2", "3", "4"]
    start = found.index("device")
    assert found[start : start + 5] == ["device", "990 µs", "2", "3", "4"]


def test_host_and_device_in_words(overlapped: Trace) -> None:
    assert host_device_timeline(overlapped, 7, 5).text.splitlines() == [
        "Host and device, 1 step from step 7, 2.23 ms.",
        "Step 7: schedule at 0 µs for 80 µs, launch at 80 µs for 220 µs, decode on the device at 1.20 ms for 990 µs, "
        "wait at 1.30 ms for 900 µs, process at 2.20 ms for 30 µs.",
    ]


@pytest.mark.parametrize(("seconds", "unit"), [(5e-6, "µs"), (1e-3, "µs"), (0.5, "ms"), (40.0, "s")])
def test_the_axis_suits_the_time(seconds: float, unit: str) -> None:
    picture = host_device_timeline(FakeTrace(Event("launch", HOST, 3.0, seconds, {"step": 0})))
    ticks = [text for text in texts(picture)[3:] if text.endswith(f" {unit}")]
    assert 3 <= len(ticks) <= 12
    assert_sound(picture)


def test_no_steps_on_the_axis(overlapped: Trace) -> None:
    picture = host_device_timeline(overlapped, 100)
    assert boxes(picture) == []
    assert picture.text == "Host and device, 0 steps from step 100, 0 µs."
    assert_sound(picture)


def test_numbers_that_do_not_fit_are_left_out() -> None:
    events = [Event("launch", HOST, 1.0 + step * 1e-5, 5e-6, {"step": step}) for step in range(1000)]
    picture = host_device_timeline(FakeTrace(*events), 0, 1000)
    assert_sound(picture)
    assert len(boxes(picture)) == 1000
    assert len(texts(picture)) < 40


# -- kernel timeline -------------------------------------------------------------------------------------------------

IN_TURN = [("norm", 0.0, 2.0), ("linear", 3.0, 8.0), ("norm", 9.0, 10.0)]
EARLY = [("norm", 0.0, 2.5), ("linear", 1.0, 6.0), ("merge", 2.5, 7.0)]


def test_each_kernel_is_a_box_where_and_as_long_as_it_ran() -> None:
    picture = kernel_timeline({"in turn": IN_TURN, "early": EARLY}, "One layer")
    scale = (WIDTH - 28) / 10
    drawn = boxes(picture)[:6]
    in_lanes = [*IN_TURN, EARLY[0], EARLY[2], EARLY[1]]
    expected = [(14 + start * scale, (end - start) * scale - 0.5) for _, start, end in in_lanes]
    assert [float(box.get("x", "")) for box in drawn] == pytest.approx([x for x, _ in expected], rel=1e-3)
    assert [float(box.get("width", "")) for box in drawn] == pytest.approx([width for _, width in expected], rel=1e-3)
    fills = [box.get("fill") for box in boxes(picture)]
    assert fills[0] == fills[2] == fills[3] != fills[1]
    assert "early: norm from 0.0 to 2.5, linear from 1.0 to 6.0, merge from 2.5 to 7.0." in picture.text
    assert {"in turn", "10.0 µs", "7.0 µs", "merge"} <= set(texts(picture))
    assert_sound(picture)


def test_only_what_runs_at_the_same_time_is_in_another_lane() -> None:
    heights = [float(box.get("y", "")) for box in boxes(kernel_timeline({"a": IN_TURN, "b": EARLY}, ""))[:6]]
    assert heights[0] == heights[1] == heights[2]
    assert heights[3] == heights[4] < heights[5]


def test_many_short_kernels_stay_on_the_card() -> None:
    spans = [(f"kernel_{index % 21}", index / 10, index / 10 + 0.01) for index in range(300)]
    assert_sound(kernel_timeline({"many": spans}, "All of a step"))
    assert_sound(kernel_timeline({"nothing": []}, "Nothing"))


def test_lanes_of_host_and_device_share_a_scale() -> None:
    one_by_one = ([("a", 0, 10), ("b", 10, 20)], [("a", 10, 12), ("b", 20, 23)])
    replay = ([("replay", 0, 10)], [("a", 10, 12), ("b", 12.5, 15.5)])
    picture = launch_lanes({"one by one": one_by_one, "replay": replay}, "Two kernels")
    assert_sound(picture)
    assert len(boxes(picture)) == 7
    assert "one by one: 2 launches, 2 kernels, 23 µs, busy for 22%." in picture.text
    assert "replay: 1 launches, 2 kernels, 16 µs, busy for 32%." in picture.text


def test_kernels_that_overlap_are_busy_once() -> None:
    device = [("a", 10, 20), ("b", 12, 18), ("c", 15, 30)]
    assert "busy for 67%" in launch_lanes({"early": ([("replay", 0, 10)], device)}, "Three kernels").text
