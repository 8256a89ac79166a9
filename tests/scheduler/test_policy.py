"""Names to policies, and what each of ours decides. What all must fulfil: ``tests/contracts/test_policy.py``."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.core import Request, SamplingParams
from minisgl.errors import ConfigError
from minisgl.scheduler.policy import (
    MAX_BYPASS,
    Demand,
    FirstComeFirstServed,
    Load,
    LongestPrefixMatch,
    Mixed,
    Optimistic,
    Plan,
    Policy,
    PrefillFirst,
    Reserve,
    Static,
)


class OddFirst:
    """An order policy from outside."""

    def arrange(self, waiting: list[Request], cached_len: object) -> list[Request]:
        return sorted(waiting, key=lambda request: request.uid % 2 == 0)


class Nothing:
    """No policy at all."""


def requests(count: int) -> list[Request]:
    prompt = np.array([1], dtype=np.int32)
    return [Request(uid=uid, prompt=prompt, params=SamplingParams(), max_len=4) for uid in range(count)]


def load(decoding: int = 0, prefilling: int = 0, waiting: int = 0, prefill_steps: int = 0) -> Load:
    return Load(decoding, prefilling, waiting, prefill_steps, max_prefill_tokens=100)


# -- names ---------------------------------------------------------------------------------------------------------


def kinds(spec: str) -> tuple[type, type, type]:
    policy = Policy.parse(spec)
    return type(policy.order), type(policy.composition), type(policy.admission)


def test_names_in_any_order_with_defaults_for_the_rest() -> None:
    assert kinds("") == (FirstComeFirstServed, PrefillFirst, Optimistic)
    assert kinds("reserve, lpm ,mixed") == (LongestPrefixMatch, Mixed, Reserve)
    assert kinds("static") == (FirstComeFirstServed, Static, Optimistic)
    assert kinds("fcfs,prefill-first,optimistic") == kinds("")


def test_a_path_names_a_policy_from_outside() -> None:
    assert kinds("tests.scheduler.test_policy:OddFirst,mixed") == (OddFirst, Mixed, Optimistic)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fifo", "unknown name 'fifo'"),
        ("fcfs,lpm", "two policies for the order"),
        ("mixed,reserve,static", "two policies for the composition"),
        ("no.such.module:Policy", "No module named 'no'"),
        ("tests.scheduler.test_policy:Missing", "has no attribute 'Missing'"),
        ("tests.scheduler.test_policy:Nothing", "unknown name"),
    ],
)
def test_wrong_names_are_config_errors(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Policy.parse(spec)


# -- order ---------------------------------------------------------------------------------------------------------


def test_first_come_first_served() -> None:
    waiting = requests(5)
    assert list(FirstComeFirstServed().arrange(waiting, lambda request: request.uid)) == waiting


def test_longest_prefix_first_and_by_arrival_among_equals() -> None:
    cached = [0, 16, 0, 32, 16]
    order = LongestPrefixMatch().arrange(requests(5), lambda request: cached[request.uid])
    assert [request.uid for request in order] == [3, 1, 4, 0, 2]


def test_a_request_that_was_bypassed_too_often_goes_before_longer_prefixes() -> None:
    waiting = requests(4)
    waiting[2].bypassed = MAX_BYPASS
    waiting[1].bypassed = MAX_BYPASS - 1
    order = LongestPrefixMatch().arrange(waiting, lambda request: 16 - request.uid if request.uid != 2 else 0)
    assert [request.uid for request in order] == [2, 0, 1, 3]


def test_a_long_queue_is_not_matched() -> None:
    def never(request: Request) -> int:
        raise AssertionError("matched")

    waiting = requests(LongestPrefixMatch.limit + 1)
    assert list(LongestPrefixMatch().arrange(waiting, never)) == waiting


# -- composition ---------------------------------------------------------------------------------------------------


def test_prefill_first_until_its_patience_ends() -> None:
    policy = PrefillFirst()
    prefill, decode = Plan(100, decode=False), Plan(0, decode=True)
    assert policy.plan(load(decoding=4, waiting=9, prefill_steps=policy.patience - 1)) == prefill
    assert policy.plan(load(decoding=4, waiting=9, prefill_steps=policy.patience)) == decode
    assert policy.plan(load(decoding=0, waiting=9, prefill_steps=policy.patience)) == prefill


def test_mixed_always_does_both() -> None:
    for steps in (0, 100):
        assert Mixed().plan(load(decoding=4, prefilling=1, prefill_steps=steps)) == Plan(100, decode=True)


def test_static_fills_only_an_empty_or_unfinished_batch() -> None:
    assert Static().plan(load(waiting=3)).prefill_tokens == 100
    assert Static().plan(load(decoding=2, prefilling=1, prefill_steps=1)).prefill_tokens == 100
    assert Static().plan(load(decoding=2, waiting=3)).prefill_tokens == 0


# -- admission -----------------------------------------------------------------------------------------------------


def test_optimistic_keeps_a_page_for_each_running_request() -> None:
    fits = Demand(now=3, at_most=50, available=7, promised=50, running=4)
    assert Optimistic().admits(fits)
    assert not Optimistic().admits(Demand(now=4, at_most=50, available=7, promised=0, running=4))


def test_reserve_counts_what_all_may_still_need() -> None:
    assert Reserve().admits(Demand(now=3, at_most=5, available=9, promised=4, running=1))
    assert not Reserve().admits(Demand(now=3, at_most=6, available=9, promised=4, running=1))
