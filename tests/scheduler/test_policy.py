"""Names to policies, and what each of ours decides. What all must fulfil: ``tests/contracts/test_policy.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.errors import ConfigError
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.policy import (
    MAX_BYPASS,
    FirstComeFirstServed,
    LongestPrefixMatch,
    MemoryDemand,
    Mixed,
    Optimistic,
    Policies,
    PrefillFirst,
    Reserve,
    SchedulerLoad,
    Static,
    StepPlan,
)
from tests.scheduler.harness import Harness


class OddFirst:
    """A queue policy from outside."""

    def order(self, waiting: list[Request], cached_len: object) -> list[Request]:
        return sorted(waiting, key=lambda request: request.uid % 2 == 0)


class Nothing:
    """No policy at all."""


def requests(count: int) -> list[Request]:
    prompt = np.array([1], dtype=np.int32)
    return [Request(uid=uid, prompt=prompt, params=SamplingParams(), max_len=4) for uid in range(count)]


def load(decoding: int = 0, prefilling: int = 0, waiting: int = 0, prefill_steps: int = 0) -> SchedulerLoad:
    return SchedulerLoad(decoding, prefilling, waiting, prefill_steps, max_prefill_tokens=100)


# -- names ---------------------------------------------------------------------------------------------------------


def kinds(**names: str) -> tuple[type, type, type]:
    policies = Policies.named(**names)
    return type(policies.queue), type(policies.batch), type(policies.admission)


def test_a_name_for_each_with_defaults_for_the_rest() -> None:
    assert kinds() == (FirstComeFirstServed, PrefillFirst, Optimistic)
    assert kinds(queue_policy="lpm", batch_policy="mixed", admission_policy="reserve") == (
        LongestPrefixMatch,
        Mixed,
        Reserve,
    )
    assert kinds(batch_policy="static") == (FirstComeFirstServed, Static, Optimistic)


def test_the_defaults_are_those_of_the_options() -> None:
    config = EngineConfig()
    named = Policies.named(config.queue_policy, config.batch_policy, config.admission_policy)
    assert (type(named.queue), type(named.batch), type(named.admission)) == kinds()
    defaults = Policies()
    assert (type(defaults.queue), type(defaults.batch), type(defaults.admission)) == kinds()


def test_a_path_names_a_policy_from_outside() -> None:
    assert kinds(queue_policy="tests.scheduler.test_policy:OddFirst") == (OddFirst, PrefillFirst, Optimistic)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"queue_policy": "fifo"}, "queue_policy: unknown name 'fifo'; choose from fcfs, lpm, or give module:Class"),
        ({"batch_policy": "lpm"}, "batch_policy: unknown name 'lpm'; choose from mixed, prefill-first, static"),
        ({"admission_policy": ""}, "admission_policy: unknown name ''; choose from optimistic, reserve"),
        ({"queue_policy": "no.such.module:Policy"}, "No module named 'no'"),
        ({"queue_policy": "tests.scheduler.test_policy:Missing"}, "has no attribute 'Missing'"),
        ({"queue_policy": "tests.scheduler.test_policy:Nothing"}, "queue_policy: .* has no method 'order'"),
        ({"batch_policy": "tests.scheduler.test_policy:OddFirst"}, "batch_policy: .* has no method 'plan'"),
        ({"admission_policy": "tests.scheduler.test_policy:OddFirst"}, "has no method 'can_admit'"),
    ],
)
def test_wrong_names_are_config_errors(names: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policies.named(**names)


# -- queue ---------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    waiting = requests(5)
    assert list(FirstComeFirstServed().order(waiting, lambda request: request.uid)) == waiting


def test_longest_prefix_first_and_by_arrival_among_equals() -> None:
    cached = [0, 16, 0, 32, 16]
    order = LongestPrefixMatch().order(requests(5), lambda request: cached[request.uid])
    assert [request.uid for request in order] == [3, 1, 4, 0, 2]


def test_a_request_that_was_bypassed_too_often_goes_before_longer_prefixes() -> None:
    waiting = requests(4)
    waiting[2].bypassed = MAX_BYPASS
    waiting[1].bypassed = MAX_BYPASS - 1
    order = LongestPrefixMatch().order(waiting, lambda request: 16 - request.uid if request.uid != 2 else 0)
    assert [request.uid for request in order] == [2, 0, 1, 3]


def test_requests_that_were_bypassed_too_often_are_in_the_same_order_as_others() -> None:
    waiting, cached = requests(4), [0, 16, 32, 16]
    for request, more in zip(waiting[:3], (2, 0, 1), strict=True):
        request.bypassed = MAX_BYPASS + more
    order = LongestPrefixMatch().order(waiting, lambda request: cached[request.uid])
    assert [request.uid for request in order] == [2, 1, 0, 3], "not by how often they were bypassed"


def test_a_queue_of_just_the_limit_is_matched() -> None:
    waiting = requests(LongestPrefixMatch.limit)
    assert list(LongestPrefixMatch().order(waiting, lambda request: request.uid)) == waiting[::-1]


def test_a_long_queue_is_not_matched() -> None:
    def never(request: Request) -> int:
        raise AssertionError("matched")

    waiting = requests(LongestPrefixMatch.limit + 1)
    assert list(LongestPrefixMatch().order(waiting, never)) == waiting


# -- batch ---------------------------------------------------------------------------------------------------------


def test_prefill_first_until_its_patience_ends() -> None:
    policy = PrefillFirst()
    prefill, decode = StepPlan(100, decode=False), StepPlan(0, decode=True)
    assert policy.plan(load(decoding=4, waiting=9, prefill_steps=policy.patience - 1)) == prefill
    assert policy.plan(load(decoding=4, waiting=9, prefill_steps=policy.patience)) == decode
    assert policy.plan(load(decoding=0, waiting=9, prefill_steps=policy.patience)) == prefill


def test_mixed_always_does_both() -> None:
    for steps in (0, 100):
        assert Mixed().plan(load(decoding=4, prefilling=1, prefill_steps=steps)) == StepPlan(100, decode=True)
    assert Mixed().plan(load(waiting=1)) == StepPlan(100, decode=True), "without rows to decode, too"


def test_static_fills_only_an_empty_or_unfinished_batch() -> None:
    assert Static().plan(load(waiting=3)).prefill_tokens == 100
    assert Static().plan(load(decoding=2, prefilling=1, prefill_steps=1)).prefill_tokens == 100
    assert Static().plan(load(decoding=2, waiting=3)).prefill_tokens == 0


# -- admission -----------------------------------------------------------------------------------------------------


def test_optimistic_keeps_a_page_for_each_running_request() -> None:
    fits = MemoryDemand(now=3, at_most=50, available=7, promised=50, running=4)
    assert Optimistic().can_admit(fits)
    assert not Optimistic().can_admit(MemoryDemand(now=4, at_most=50, available=7, promised=0, running=4))


def test_reserve_counts_what_all_may_still_need() -> None:
    assert Reserve().can_admit(MemoryDemand(now=3, at_most=5, available=9, promised=4, running=1))
    assert not Reserve().can_admit(MemoryDemand(now=3, at_most=6, available=9, promised=4, running=1))


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
