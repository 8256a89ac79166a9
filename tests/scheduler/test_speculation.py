"""When drafting pauses and resumes, by what is accepted and what it costs; time is a number that the test turns."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import pytest

from minisgl.config import EngineConfig
from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.scheduler.speculation import DraftThread, StepCosts
from tests.drafting import KnowsTheShadow
from tests.scheduler.harness import DELAYS, Harness


class Never(KnowsTheShadow):
    errors = 1.0


class Always(KnowsTheShadow):
    errors = 0.0


class Silent(KnowsTheShadow):
    def _guess(self, tokens: list[int], count: int) -> list[int]:
        return []


def harness(drafter: type[KnowsTheShadow], cost: float, delay: int = 0) -> Harness:
    made = Harness(drafter=drafter, num_pages=600, max_seq_len=2100, delay=delay, vocab=3)
    assert made.speculation is not None
    costs = StepCosts()
    costs.wants_plain_step = lambda num_rows: False
    costs.of_verification = lambda num_rows: cost
    made.speculation.costs = costs
    return made


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("drafter", [Never, Silent])
def test_drafting_pauses_where_nothing_is_accepted(drafter: type[KnowsTheShadow], delay: int) -> None:
    made = harness(drafter, 1.15, delay)
    request = made.add([1, 2], max_tokens=1000)
    while made.speculation.num_paused == 0:
        made.step()
    made.run()
    made.assert_output(request)
    with_drafts = sum(len(batch.drafts) > 0 for batch in made.batches)
    assert len(made.batches) - 1000 in (0, delay), "a draft was right that should not be, or a step was lost"
    assert with_drafts <= 0.03 * len(made.batches)
    assert (with_drafts > 0) == (drafter is Never)
    late = made.batches[400:]
    assert drafter is Silent or any(len(batch.drafts) for batch in late), "it is tried again from time to time"


def test_drafting_goes_on_where_it_pays_and_only_there() -> None:
    for cost, share in ((1.15, 1.0), (3.9, 1.0), (4.5, 0.1)):
        made = harness(Always, cost)
        request = made.add([1, 2], max_tokens=400)
        made.run()
        made.assert_output(request)
        tokens = sum(len(batch.drafts) for batch in made.batches) / 300
        assert (tokens > 0.9) == (share == 1.0), f"at {cost} plain steps a verification"


class Improves(KnowsTheShadow):
    def _guess(self, tokens: list[int], count: int) -> list[int]:
        self.errors = 1.0 if len(tokens) < 200 else 0.0
        return super()._guess(tokens, count)


def test_a_pause_ends_when_drafts_have_become_right() -> None:
    made = harness(Improves, 1.15)
    made.add([1, 2], max_tokens=1000)
    made.run()
    assert made.speculation.stats.pauses > 0
    assert made.speculation.stats.accepted > 300


def test_rows_that_pause_probe_in_the_same_steps() -> None:
    made = harness(Never, 1.15)
    for i in range(4):
        made.add([i % 3, 2], max_tokens=600)
    made.run()
    late = [batch for batch in made.batches[200:] if len(batch.drafts)]
    assert late
    assert np.mean([len(batch.drafts) / batch.num_rows for batch in late]) >= 2, "of at most three"


def test_the_cost_of_a_verification_is_measured() -> None:
    costs = StepCosts()
    assert costs.wants_plain_step(5)
    assert costs.of_verification(5) == pytest.approx(1.15)
    for verifies, seconds in ((False, 2.0), (True, 5.0)):
        costs.note(5, verifies, 100.0)  # the first step compiles
        for _ in range(3):
            costs.note(6, verifies, seconds)  # as many rows, but for a power of two
    assert not costs.wants_plain_step(4)
    assert costs.of_verification(7) == pytest.approx(2.5)
    costs.note(4, True, 1e6)
    assert costs.of_verification(7) < 3, "a stall is no measure"
    assert costs.wants_plain_step(9)


def test_a_period_is_measured_between_two_steps() -> None:
    """With overlap, a step begins to count when the one before it has ended."""
    made = Harness(drafter=Silent, num_pages=64, delay=1)
    speculation = made.speculation
    assert speculation is not None
    noted: list[float] = []
    costs = StepCosts()
    costs.note = lambda num_rows, verifies, seconds: noted.append(seconds)
    speculation.costs = costs
    ticks = iter(range(1000))
    speculation._clock = lambda: float(next(ticks))
    speculation._limit[:] = 0
    made.add(
        [1],
        max_tokens=8,
    )
    made.run()
    assert all(0 < seconds <= 2 for seconds in noted)
    assert len(speculation._started) == 0


def test_a_thread_that_stands_still_is_left_behind() -> None:
    gate = threading.Event()
    thread = DraftThread(0.05)
    assert thread.call(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        thread.call(lambda: 1 // 0)
    for _ in range(4):
        with pytest.raises(TimeoutError, match="did not answer within"):
            thread.call(gate.wait)
    with pytest.raises(TimeoutError, match="it stood still 4 times"):
        thread.call(lambda: 3)
    gate.set()


def test_a_target_knows_its_engine() -> None:
    assert DraftTarget(EngineConfig(), 3, 8, 64).engine is None


def test_the_time_of_drafting_counts_as_that_of_the_step() -> None:
    class Slow(Always):
        def propose(self, rows: Sequence[DraftRow]) -> list[list[int]]:
            clock[0] += 7.0
            return super().propose(rows)

    clock = [0.0]
    made = harness(Slow, 1.0)
    speculation = made.speculation
    assert speculation is not None
    noted: list[tuple[bool, float]] = []
    speculation.costs.note = lambda num_rows, verifies, seconds: noted.append((verifies, seconds))
    speculation._clock = lambda: clock[0]
    made.add([1, 2], max_tokens=40)
    made.run()
    assert {seconds for verifies, seconds in noted if verifies} == {7.0}
    assert {seconds for verifies, seconds in noted if not verifies} <= {0.0}
    assert len(noted) > 5
