"""The waiting queue: its order, its limit, and requests that come back."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.errors import QueueFull
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.admission import TURN, WaitingQueue


def request(uid: int) -> Request:
    return Request(uid=uid, prompt=np.array([1], dtype=np.int32), params=SamplingParams(), max_len=4)


def uids(queue: WaitingQueue) -> list[int]:
    return [request.uid for request in queue]


def test_requests_leave_in_order_of_arrival() -> None:
    queue = WaitingQueue(10)
    for uid in (3, 5, 9):
        queue.add(request(uid))
    assert uids(queue) == [3, 5, 9]
    assert len(queue) == 3


def test_preempted_requests_come_before_all_others_and_by_arrival() -> None:
    queue = WaitingQueue(10)
    queue.add(request(7))
    for uid in (4, 2, 3):
        queue.put_back(request(uid))
    assert uids(queue) == [2, 3, 4, 7]


def test_the_limit_counts_new_requests_only() -> None:
    queue = WaitingQueue(2)
    queue.put_back(request(1))
    queue.add(request(2))
    assert queue.has_room
    queue.add(request(3))
    assert not queue.has_room
    with pytest.raises(QueueFull, match="max_queued_requests"):
        queue.add(request(4))
    queue.put_back(request(0))
    assert uids(queue) == [0, 1, 2, 3]


def test_only_earlier_requests_are_bypassed() -> None:
    queue = WaitingQueue(10)
    waiting = [request(uid) for uid in (1, 2, 5)]
    for each in waiting:
        queue.add(each)
    queue.note_bypass(request(3))
    queue.note_bypass(request(0))
    assert [each.bypassed for each in waiting] == [1, 1, 0]


def test_groups_take_turns_and_none_stands_before_all_later_ones() -> None:
    queue = WaitingQueue(1000)
    large = [request(uid) for uid in range(1, 101)]
    for each in large:
        each.group = 1
        queue.add(each)
    queue.add(request(101))
    left = []
    while len(queue):
        first = queue.first(1000)
        assert len(first) == len(queue)
        assert first[:1] == queue.first(1)
        queue.remove(first[0])
        left.append(first[0].uid)
        if first[0].uid == 40:
            queue.add(request(102))
            queue.add(request(103))
    turns = [*range(1, TURN + 1), 101, *range(TURN + 1, 2 * TURN + 1), 102, 103, *range(2 * TURN + 1, 101)]
    assert left == turns
    assert not queue.new.groups
    assert not queue.new._left


def test_clients_take_turns_however_many_bodies_they_send() -> None:
    queue = WaitingQueue(1000)
    for uid in range(1, 141):  # a client with 100 bodies of one request, and a body of 40
        each = request(uid)
        each.client, each.group = "a", min(uid, 101)
        queue.add(each)
    for uid in (141, 142):
        each = request(uid)
        each.client = "b"
        queue.add(each)
    left = []
    while len(queue):
        (first,) = queue.first(1)
        queue.remove(first)
        left.append(first.uid)
    assert left[TURN : TURN + 2] == [141, 142]
    assert left[:TURN] == list(range(1, TURN + 1))
    assert sorted(left) == list(range(1, 143))


@pytest.mark.parametrize("num_clients", [1, 4])
def test_what_may_come_first_is_what_comes(num_clients: int) -> None:
    queue = WaitingQueue(1000)
    for uid in range(300):
        each = request(uid)
        each.client = str(uid * uid % 7 % num_clients)
        each.group = uid % 3 if uid % 5 else None
        queue.add(each)
    expected, came = [each.uid for each in queue.first(1000)], []
    while len(queue):
        (first,) = queue.first(1)
        queue.remove(first)
        came.append(first.uid)
    assert sorted(expected) == list(range(300))
    assert came == expected


def test_remove_finds_a_request_wherever_it_waits() -> None:
    queue = WaitingQueue(2)
    preempted, first, second = request(1), request(2), request(3)
    queue.add(first)
    queue.add(second)
    queue.put_back(preempted)
    queue.remove(first)
    queue.remove(preempted)
    assert uids(queue) == [3]
    assert queue.has_room
    with pytest.raises(KeyError):
        queue.remove(first)
