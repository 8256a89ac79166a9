"""An order that keeps books hears of every request, once when it starts and once when it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import pytest

from minisgl.core import Request
from minisgl.scheduler.policy import FirstComeFirstServed, Policies
from tests.scheduler.harness import Harness


class Books(FirstComeFirstServed):
    def __init__(self) -> None:
        self.admitted: list[tuple[int, str, int]] = []
        self.finished: list[tuple[int, int]] = []

    def order(self, waiting: Sequence[Request], cached_len: Callable[[Request], int]) -> Iterable[Request]:
        return reversed(waiting)

    def on_admit(self, request: Request) -> None:
        assert request.slot >= 0
        self.admitted.append((request.uid, request.user, request.cached_tokens))

    def on_finish(self, request: Request) -> None:
        assert request.finish_reason is not None
        self.finished.append((request.uid, len(request.output)))


@pytest.fixture
def books() -> Books:
    return Books()


def harness_of(books: Books, **options: int) -> Harness:
    return Harness(policies=Policies(queue=books), **options)


def test_a_request_starts_and_ends(books: Books) -> None:
    harness = harness_of(books, max_running=1)
    harness.add([1] * 9, max_tokens=2, user="a")
    harness.run()
    harness.add([1] * 9, max_tokens=3, user="b")
    harness.run()
    assert books.admitted == [(0, "a", 0), (1, "b", 8)]
    assert books.finished == [(0, 2), (1, 3)]


def test_one_that_never_started_ends_too(books: Books) -> None:
    harness = harness_of(books, max_running=1)
    first, second = harness.add([1], max_tokens=5), harness.add([2], max_tokens=5)
    harness.step()
    assert [uid for uid, *_ in books.admitted] == [second.uid]
    harness.abort(first)
    assert books.finished == [(first.uid, 0)]


def test_a_preempted_request_starts_once(books: Books) -> None:
    harness = harness_of(books, page_size=1, num_pages=24)
    requests = [harness.add([i % 3] * 4, max_tokens=12) for i in range(4)]
    harness.run()
    assert sum(request.preemptions for request in requests) > 0
    assert sorted(uid for uid, *_ in books.admitted) == [0, 1, 2, 3]
    assert sorted(books.finished) == [(0, 12), (1, 12), (2, 12), (3, 12)]


def test_other_orders_keep_none() -> None:
    assert Policies.named("lpm").usage_listener is None
