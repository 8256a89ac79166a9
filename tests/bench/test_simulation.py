"""A simulated fleet is the engine's scheduler on a clock that is only added to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from minisgl.bench import planning
from minisgl.bench.host import decode_batch_of, prefill_batch_of
from minisgl.bench.planning import RealTimeFleet, calibrated, run_simulation
from minisgl.bench.routing import KVAware, RoundRobin
from minisgl.bench.simulation import (
    ANSWER,
    Arrival,
    Conversations,
    Fleet,
    Outcome,
    ReplicaSpec,
    SimulatedReplica,
    StepTime,
)
from minisgl.errors import ConfigError

STEP = StepTime(weights=0.01, token=1e-4, key=0.0)
SMALL = ReplicaSpec(STEP, pool_tokens=8192, max_running=8, max_seq_len=2048)


def serve(trace: list[Arrival], replicas: int = 1, spec: ReplicaSpec = SMALL, router: object = None) -> Outcome:
    fleet = Fleet([SimulatedReplica(spec) for _ in range(replicas)], router or RoundRobin(replicas))
    outcome = fleet.run(trace, 1.0)
    assert fleet.in_flight.tolist() == [0] * replicas
    for replica in fleet.replicas:
        replica.loop.scheduler.check()
    return outcome


def test_a_request_alone_takes_its_steps() -> None:
    outcome = serve([Arrival(2.0, (7,), (500,), 4)])
    assert outcome.ttft[0] == pytest.approx(0.05), "500 tokens at 0.1 ms"
    assert outcome.tpot[0] == pytest.approx(0.01), "the weights are read once a token"
    assert outcome.finished[0] == pytest.approx(2.08)
    assert outcome.hit_rate == 0.0


def test_a_later_turn_finds_the_first_and_its_answer() -> None:
    turn = Arrival(0.0, (7,), (128,), 64)
    later = Arrival(9.0, (7, ANSWER, 8), (128, 64, 100), 1)
    outcome = serve([turn, later])
    # The last token of the answer is never fed: its page is not full.
    assert outcome.cached.tolist() == [0, 128]
    assert serve([turn._replace(output_len=65), later]).cached.tolist() == [0, 192]


def test_round_robin_sends_it_where_nothing_is() -> None:
    trace = [Arrival(0.0, (7,), (640,), 1), Arrival(9.0, (7,), (640,), 1)]
    assert serve(trace, 2).cached.tolist() == [0, 0]
    assert serve(trace, 2, router=KVAware(2)).cached.tolist() == [0, 576], "all pages but that of the last token"


def test_requests_wait_for_a_step_that_runs() -> None:
    outcome = serve([Arrival(0.0, (7,), (1000,), 1), Arrival(0.05, (8,), (1000,), 1)])
    assert outcome.ttft.tolist() == pytest.approx([0.1, 0.15])


def test_events_that_come_late_cost_hits_and_nothing_else() -> None:
    trace = Conversations(
        8.0, 20.0, system_len=300, user_len=60, document_len=300, output_len=8, max_len=1500
    ).arrivals()
    rates = []
    for lag in (0.0, 1e6):
        fleet = Fleet([SimulatedReplica(SMALL) for _ in range(4)], KVAware(4), event_lag=lag)
        outcome = fleet.run(trace, 20.0)
        assert (outcome.finished >= outcome.first).all()
        assert (outcome.first > outcome.arrived).all()
        rates.append(outcome.hit_rate)
    assert rates[0] > rates[1] + 0.05


def test_a_prompt_that_never_fits_is_an_error_that_says_so() -> None:
    with pytest.raises(ConfigError, match="pool_tokens"):
        serve([Arrival(0.0, (7,), (1000,), 1)], spec=ReplicaSpec(STEP, pool_tokens=512, max_seq_len=2048))


def test_a_trace_has_its_rate_its_bursts_and_shared_beginnings() -> None:
    traffic = Conversations(20.0, 400.0)
    trace = traffic.arrivals()
    assert trace == traffic.arrivals(), "it follows from the seed"
    assert len(trace) / 400 == pytest.approx(20.0, rel=0.15)
    assert len({each.ids[0] for each in trace}) == traffic.applications
    assert max(sum(each.lens) + each.output_len for each in trace) <= traffic.max_len
    assert all(0 <= each.time < 400 for each in trace)
    later = [each for each in trace if ANSWER in each.ids]
    assert 0.5 < len(later) / len(trace) < 0.85
    assert len(later[0].prompt) == sum(later[0].lens)


def test_fitted_step_times_are_those_that_were_made() -> None:
    real = StepTime(0.0, 3e-4, 2e-7, 5e-8, fixed=0.004, row=1e-3, prompt=2e-3)
    prompts = ((1, 99), (3, 700), (9, 120), (2, 40))
    batches = [decode_batch_of(rows) for rows in (1, 8, 64)] + [prefill_batch_of(n, m) for n, m in prompts]
    fitted = StepTime.fitted(batches, [real(batch) for batch in batches])
    for batch in batches:
        assert fitted(batch) == pytest.approx(real(batch), rel=1e-6)
    assert fitted.spread == pytest.approx([1.0] * len(fitted.spread))
    only_fixed = StepTime.fitted(batches, [0.5] * len(batches))
    assert only_fixed.fixed == pytest.approx(0.5)
    assert min(only_fixed.row, only_fixed.prompt, only_fixed.token, only_fixed.key, only_fixed.pair) >= 0


def test_steps_that_differ_are_fitted_on_average_and_spread() -> None:
    """Every other step takes three times as long: no less time is planned for all of them, and both come up."""
    real = StepTime(0.0, 3e-4, 0.0, fixed=0.004)
    batches = [decode_batch_of(rows) for rows in (1, 8, 64)] * 20
    taken = [(1.0 if number % 2 else 3.0) * real(batch) for number, batch in enumerate(batches)]
    fitted = StepTime.fitted(batches, taken)
    assert sum(map(fitted, batches)) == pytest.approx(sum(taken))
    assert np.mean(fitted.spread) == pytest.approx(1.0)
    assert (min(fitted.spread), max(fitted.spread)) == pytest.approx((0.5, 1.5), rel=0.01)
    spec = ReplicaSpec(fitted, pool_tokens=8192, max_seq_len=2048)
    trace = [Arrival(float(n), (n,), (128,), 1) for n in range(40)]
    ttft = Fleet([SimulatedReplica(spec)], RoundRobin(1)).run(trace, 40.0).ttft
    assert ttft.max() == pytest.approx(3 * ttft.min(), rel=0.01)


def test_step_times_of_an_h200_come_from_results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = calibrated("Qwen3-0.6B"), calibrated("Qwen3-14B")
    assert small.weights < large.weights
    assert small.token < large.token
    assert large(prefill_batch_of(1, 8192)) > 10 * large(decode_batch_of(1))
    with pytest.raises(ConfigError, match="Qwen3-14B"):
        calibrated("Qwen3-99B")
    monkeypatch.setattr(planning, "_RESULTS", tmp_path)
    with pytest.raises(ConfigError, match="no step times"):
        calibrated()


def test_the_outcome_counts_what_was_in_time() -> None:
    three = np.array([0.0, 1.0, 2.0])
    ints = np.array([10, 10, 10], dtype=np.int32)
    outcome = Outcome(
        three, np.array([0.5, 3.0, 2.5]), np.array([1.4, 3.9, 11.5]), ints, ints, ints // 2, ints * 0, 2, 3.0
    )
    good = outcome.good(1.0, 0.2)
    assert good.tolist() == [True, False, False]
    assert outcome.hit_rate == 0.5
    assert outcome.imbalance == 2.0
    assert outcome.dollars_per_million(good, 3.6) == pytest.approx(2 * 3.0 / 3600 * 3.6 / 10 * 1e6)
    assert outcome.dollars_per_million(good & False, 3.6) == np.inf
    assert len(outcome.since(1.0).first) == 2
    assert outcome.since(1.0).seconds == 2.0


def test_in_real_time_it_is_the_same_fleet() -> None:
    """No time is asserted: where requests come one by one, only the order decides what is found."""
    trace = [Arrival(0.05 * n, (1 + n % 3, 9 + n), (128, 64), 1 + n % 2) for n in range(12)]
    spec = ReplicaSpec(StepTime(1e-3, 1e-6, 0.0), pool_tokens=8192, max_running=8, max_seq_len=2048)
    fleet = RealTimeFleet([SimulatedReplica(spec) for _ in range(2)], RoundRobin(2))
    outcome = fleet.run(trace, 1.0)
    assert outcome.replica.tolist() == [0, 1] * 6
    assert (outcome.finished >= outcome.first).all()
    assert (outcome.first > outcome.arrived).all()
    assert outcome.cached.sum() == 6 * 128, "each of three prefixes is computed twice"
    assert fleet.in_flight.tolist() == [0, 0]


def test_in_real_time_an_error_is_raised_too() -> None:
    spec = ReplicaSpec(STEP, pool_tokens=512, max_seq_len=2048)
    with pytest.raises(ConfigError, match="pool_tokens"):
        RealTimeFleet([SimulatedReplica(spec)], RoundRobin(1)).run([Arrival(0.0, (7,), (1000,), 1)], 1.0)


def test_the_command_reports_every_router_a_plan_and_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "_SMALL", replace(planning._SMALL, seconds=4.0))
    report = run_simulation([1, 2], load=2.0, seconds=3.0, check=["tiny"], options={"max_seq_len": 2048})
    check, fleets, plan = report.tables
    assert [row[:2] for row in check.rows[:2]] == [["round-robin", "measured"], ["round-robin", "simulated"]]
    assert len(fleets.rows) == 10
    assert len(plan.rows) == 5
    assert len(report.targets) == 12
    fitted = report.settings["check tiny, kv-aware"]["step_time"]
    costs = [cost for name, cost in fitted.items() if name != "spread"]  # on a busy machine any of them may be 0
    assert min(costs) >= 0
    assert max(costs) > 0
