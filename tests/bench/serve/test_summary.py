"""Times and rates of records that were made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from minisgl.bench.serve.records import Outcome
from minisgl.bench.serve.summary import Limits, Summary, percentiles
from tests.bench.serve.records import planned, record

LIMITS = Limits(ttft=1.0, tpot=0.1)


def test_percentiles_are_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=137).tolist()
    ordered = sorted(values)
    found = percentiles(values, 50, 99, 0, 100)
    assert found is not None
    assert found[0] == ordered[68]
    assert found[1] == pytest.approx(ordered[134] + 0.64 * (ordered[135] - ordered[134]))  # rank 0.99 × 136 = 134.64
    assert found[2:] == [ordered[0], ordered[-1]]
    assert percentiles([], 50) is None


def test_times_count_from_when_a_request_was_due() -> None:
    one = record(10.0, 10.5, 10.7, 11.1, sent=10.2, ended=11.3)
    assert one.ttft == pytest.approx(0.5)
    assert one.tpot == pytest.approx(0.3)
    assert one.latency == pytest.approx(1.3)
    summary = Summary("4/s", [one], LIMITS)
    assert summary.gaps == pytest.approx([0.2, 0.4])
    assert summary.lateness == pytest.approx([0.2])


def test_tokens_that_come_together_are_all_counted() -> None:
    one = record(0.0, 1.0, 2.0, tokens=6)  # two pieces of three tokens
    assert one.tpot == pytest.approx(0.2)
    assert record(0.0, 1.0, tokens=1).tpot is None


def test_rates_are_over_all_the_time_and_of_what_finished() -> None:
    records = [
        record(0.0, 0.5, 1.0),
        record(1.0, 2.0, 4.0),
        record(2.0, ended=5.0, outcome=Outcome.REFUSED),
        record(2.0, 2.5, ended=2.6, outcome=Outcome.LEFT),
    ]
    summary = Summary("", records, LIMITS)
    assert summary.seconds == 5.0
    assert summary.throughput == pytest.approx(2 / 5)
    assert summary.output_throughput == pytest.approx(4 / 5)
    assert summary.outcomes[Outcome.FINISHED] == 2
    assert len(summary.ttft) == 2
    assert summary.little == pytest.approx((1.0 + 3.0 + 3.0 + 0.6) / 5)


def test_goodput_counts_what_finished_within_both_limits() -> None:
    good = [record(0.0, 1.0, 1.05), record(0.0, 0.9, tokens=1), record(0.0, 0.5, 0.65, 0.68)]
    late = record(0.0, 1.2, 1.25)
    slow = record(0.0, 0.5, 0.8)
    hasty = record(0.0, 0.1, 0.2, outcome=Outcome.WRONG_LENGTH)
    last = record(0.0, 0.2, 10.0)
    assert [LIMITS.kept_by(each) for each in (*good, late, slow, hasty, last)] == [True] * 3 + [False] * 4
    assert Summary("", [*good, late, slow, hasty, last], LIMITS).goodput == pytest.approx(3 / 10)


@pytest.mark.parametrize(
    ("fields", "answered"),
    [
        ({}, True),
        ({"outcome": Outcome.REFUSED, "status": 503}, True),
        ({"outcome": Outcome.FAILED}, True),
        ({"outcome": Outcome.LEFT}, True),
        ({"outcome": Outcome.WRONG_LENGTH}, False),
        ({"outcome": Outcome.UNREADABLE, "status": 500}, False),
        ({"outcome": Outcome.CLOSED}, False),
        ({"outcome": Outcome.UNREACHABLE}, False),
        ({"outcome": Outcome.TIMEOUT}, False),
        ({"planned": planned(malformed="cut off"), "outcome": Outcome.REFUSED, "status": 400}, True),
        ({"planned": planned(malformed="cut off"), "outcome": Outcome.REFUSED, "status": 500}, False),
        ({"planned": planned(malformed="cut off")}, False),
    ],
)
def test_a_server_does_its_duty_with_tokens_or_a_typed_error(fields: dict[str, object], answered: bool) -> None:
    one = record(0.0, 1.0, **fields)
    assert one.answered is answered
    assert Summary("", [one, record(0.0, 1.0)], LIMITS).answered == (1.0 if answered else 0.5)
