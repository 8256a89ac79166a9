"""Plans follow from their seed, and have exactly the faults that were asked for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from minisgl.bench.serve.bodies import MALFORMED
from minisgl.bench.serve.errors import LoadError
from minisgl.bench.serve.workload import Workload
from tests.bench.serve.test_traces import MOONCAKE, write


def test_lengths_lie_between_the_least_and_the_most() -> None:
    plan = Workload(500, (8, 32), (1, 16)).plan(None, 0)
    assert {each.input_len for each in plan} == set(range(8, 33))
    assert {each.output_len for each in plan} == set(range(1, 17))
    assert [each.index for each in plan] == list(range(500))
    assert {each.due for each in plan} == {0.0}


def test_exact_shares_misbehave_and_nobody_twice() -> None:
    plan = Workload(400, (8, 8), (4, 9), disconnects=0.1, malformed=0.05).plan(None, 0)
    leaving = [each for each in plan if each.leave_after is not None]
    wrong = [each for each in plan if each.malformed is not None]
    assert (len(leaving), len(wrong)) == (40, 20)
    assert not set(leaving) & set(wrong)
    assert all(0 <= (each.leave_after or 0) < each.output_len for each in leaving)
    assert set(Counter(each.malformed for each in wrong)) == set(MALFORMED)
    assert max(each.index for each in leaving) > 200 > min(each.index for each in leaving)


def test_a_run_is_repeated_by_its_seed_and_differs_from_the_next() -> None:
    workload = Workload(50, (8, 32), (1, 16), disconnects=0.2, seed=7)
    assert workload.plan(4.0, 0) == workload.plan(4.0, 0)
    assert workload.plan(4.0, 0) != workload.plan(4.0, 1)


def test_an_open_loop_has_times_of_its_kind() -> None:
    random = [each.due for each in Workload(200, seed=1).plan(10.0, 0)]
    even = [each.due for each in Workload(200, arrivals="constant").plan(10.0, 0)]
    assert random == sorted(random)
    assert random[-1] == pytest.approx(20.0, rel=0.25)
    assert even[:3] == [0.1, 0.2, pytest.approx(0.3)]
    assert random != even


def test_a_trace_brings_lengths_blocks_and_times(tmp_path: Path) -> None:
    later = {**MOONCAKE, "timestamp": 3500, "output_length": 9}
    workload = Workload(trace=write(tmp_path, MOONCAKE, later))
    first, second = workload.plan(None, 0)
    assert (first.due, second.due) == (0.0, 2.0)
    assert (first.input_len, first.output_len, second.output_len) == (600, 7, 9)
    assert first.blocks is not None
    assert first.blocks.ids == (0, 9)
    assert [each.due for each in workload.plan(5.0, 0)] == [0.0, pytest.approx(0.2)]
    assert len(Workload(1, trace=workload.trace).plan(None, 0)) == 1
    with pytest.raises(LoadError, match=r"requests: .* has 2, got 3"):
        Workload(3, trace=workload.trace).plan(None, 0)
