"""What every scheduling policy must fulfil, alone and inside an engine that runs out of memory.

Three protocols: a queue policy orders the queue, a batch policy plans a step, an admission policy says who may start.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from minisgl.registry import resolve
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.policy import (
    ADMISSION_POLICIES,
    BATCH_POLICIES,
    QUEUE_POLICIES,
    AdmissionPolicy,
    BatchPolicy,
    MemoryDemand,
    Policies,
    QueuePolicy,
    SchedulerLoad,
)
from tests.scheduler.harness import Harness

CONTRACTS = {
    "make_queue_policy": (QUEUE_POLICIES, QueuePolicy),
    "make_batch_policy": (BATCH_POLICIES, BatchPolicy),
    "make_admission_policy": (ADMISSION_POLICIES, AdmissionPolicy),
}


@pytest.fixture
def make_queue_policy(request: pytest.FixtureRequest) -> Callable[[], QueuePolicy]:
    return resolve("--impl", request.param, QUEUE_POLICIES)


@pytest.fixture
def make_batch_policy(request: pytest.FixtureRequest) -> Callable[[], BatchPolicy]:
    return resolve("--impl", request.param, BATCH_POLICIES)


@pytest.fixture
def make_admission_policy(request: pytest.FixtureRequest) -> Callable[[], AdmissionPolicy]:
    return resolve("--impl", request.param, ADMISSION_POLICIES)


def requests(count: int) -> list[Request]:
    rng = np.random.default_rng(count)
    return [
        Request(uid=uid, prompt=rng.integers(0, 9, 1 + uid % 7, dtype=np.int32), params=SamplingParams(), max_len=16)
        for uid in range(count)
    ]


def serve(policies: Policies) -> None:
    """Run 30 requests through a small pool; every invariant is checked after every step."""
    harness = Harness(page_size=2, num_pages=12, max_running=5, max_prefill_tokens=5, policies=policies)
    added = [harness.add([i % 3] * (1 + i % 8), max_tokens=1 + i % 9) for i in range(30)]
    harness.run(limit=2000)
    for request in added:
        assert request.finish_reason is FinishReason.LENGTH, request.error
        harness.assert_output(request)
    harness.assert_idle_and_clean()


# -- queue ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 1, 2, 50, 200])
@pytest.mark.parametrize("cached", ["nothing", "all the same", "different"])
def test_an_order_is_a_permutation(make_queue_policy: Callable[[], QueuePolicy], count: int, cached: str) -> None:
    waiting = requests(count)
    before = list(waiting)
    lengths = {"nothing": lambda uid: 0, "all the same": lambda uid: 8, "different": lambda uid: uid * 37 % 11}
    arranged = list(make_queue_policy().order(waiting, lambda request: lengths[cached](request.uid)))
    assert sorted(request.uid for request in arranged) == list(range(count))
    assert waiting == before, "the queue itself is not touched"


def test_an_order_depends_on_its_arguments_alone(make_queue_policy: Callable[[], QueuePolicy]) -> None:
    """Every rank of a group must come to the same order."""
    order = make_queue_policy()

    def cached_len(request: Request) -> int:
        return request.uid * 37 % 11

    first = [request.uid for request in order.order(requests(40), cached_len)]
    assert [request.uid for request in order.order(requests(40), cached_len)] == first
    assert [request.uid for request in make_queue_policy().order(requests(40), cached_len)] == first


def test_an_order_starves_nobody(make_queue_policy: Callable[[], QueuePolicy]) -> None:
    """One request at a time, and a stream of requests that have more of their prompt in the cache."""
    harness = Harness(max_running=1, num_pages=64, policies=Policies(queue=make_queue_policy()))
    harness.add([1] * 17, max_tokens=1)
    harness.run()
    harness.add([1] * 17, max_tokens=1)
    cold = harness.add([0] * 3, max_tokens=1)
    for _ in range(300):
        harness.add([1] * 17, max_tokens=1)
        harness.step()
    assert cold.finish_reason is FinishReason.LENGTH


def test_an_order_serves_everybody(make_queue_policy: Callable[[], QueuePolicy]) -> None:
    for name in BATCH_POLICIES:
        serve(replace(Policies.named(batch_policy=name), queue=make_queue_policy()))


# -- batch ---------------------------------------------------------------------------------------------------------


def test_a_plan_stays_within_the_limit(make_batch_policy: Callable[[], BatchPolicy]) -> None:
    composition = make_batch_policy()
    for decoding, prefilling, waiting, steps, limit in product((0, 1, 99), (0, 1), (0, 5), (0, 1, 8, 500), (1, 8192)):
        plan = composition.plan(SchedulerLoad(decoding, prefilling, waiting, steps, limit))
        assert 0 <= plan.prefill_tokens <= limit
        assert isinstance(plan.decode, bool)


def test_a_plan_gets_prompts_started(make_batch_policy: Callable[[], BatchPolicy]) -> None:
    """With nothing to decode, a plan without prefill would stall the engine for ever."""
    composition = make_batch_policy()
    for prefilling, waiting, steps in ((1, 0, 0), (0, 1, 0), (3, 9, 1), (0, 9, 500)):
        assert composition.plan(SchedulerLoad(0, prefilling, waiting, steps, 64)).prefill_tokens > 0


def test_a_composition_serves_everybody(make_batch_policy: Callable[[], BatchPolicy]) -> None:
    for queue, admission in product(QUEUE_POLICIES, ADMISSION_POLICIES):
        serve(replace(Policies.named(queue, admission_policy=admission), batch=make_batch_policy()))


@pytest.mark.not_for("static")
def test_a_composition_lets_decodes_run(make_batch_policy: Callable[[], BatchPolicy]) -> None:
    """A stream of prompts that never ends does not keep a running request from its next token for ever.

    (Static batching fills its batch first, however long that takes: one of the reasons why nobody uses it.)
    """
    policies = Policies(batch=make_batch_policy())
    harness = Harness(num_pages=256, max_running=64, max_prefill_tokens=4, prefix_cache="none", policies=policies)
    first = harness.add([1] * 4, max_tokens=4)
    for _ in range(100):
        harness.add([2] * 4, max_tokens=1)
        harness.step()
        if first.finish_reason is not None:
            break
    harness.assert_output(first)
    assert first.finish_reason is FinishReason.LENGTH


# -- admission -----------------------------------------------------------------------------------------------------


def test_an_idle_engine_admits_what_fits(make_admission_policy: Callable[[], AdmissionPolicy]) -> None:
    admission = make_admission_policy()
    for available, at_most in product((1, 2, 64, 4096), (1, 2, 64, 4096)):
        if at_most <= available:
            for now in {1, at_most}:
                demand = MemoryDemand(now=now, at_most=at_most, available=available, promised=0, running=0)
                assert admission.can_admit(demand) is True


def test_an_admission_serves_everybody(make_admission_policy: Callable[[], AdmissionPolicy]) -> None:
    for queue, batch in product(QUEUE_POLICIES, BATCH_POLICIES):
        serve(replace(Policies.named(queue, batch), admission=make_admission_policy()))
