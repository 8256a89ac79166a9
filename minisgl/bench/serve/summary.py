"""Numbers of a run: how long, how many, and how many in time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from minisgl.bench.serve.records import Outcome, Record


@dataclass(frozen=True, slots=True)
class Limits:
    """What a user puts up with, in seconds: waiting for the first token, and for each one after it."""

    ttft: float
    tpot: float

    def kept_by(self, record: Record) -> bool:
        """Whether a request finished, and in time. An answer of one token has no time per token to exceed."""
        in_time = record.outcome is Outcome.FINISHED and record.ttft <= self.ttft
        return in_time and (record.tpot is None or record.tpot <= self.tpot)


@dataclass(frozen=True)
class Summary:
    """A run under one load.

    Args:
        load: in words.
        records: of all its requests, at least one.
        limits: of goodput.
    """

    load: str
    records: Sequence[Record]
    limits: Limits

    @cached_property
    def finished(self) -> list[Record]:
        """Those that count for times: with all their tokens."""
        return [record for record in self.records if record.outcome is Outcome.FINISHED]

    @cached_property
    def seconds(self) -> float:
        """From the first request to the end of the last."""
        return max(record.ended for record in self.records) - min(record.due for record in self.records)

    @property
    def outcomes(self) -> Counter[Outcome]:
        """How many requests ended how."""
        return Counter(record.outcome for record in self.records)

    @property
    def answered(self) -> float:
        """Share of the requests by which the server did its duty, see `Record.answered`."""
        return sum(record.answered for record in self.records) / len(self.records)

    @property
    def throughput(self) -> float:
        """Finished requests a second."""
        return len(self.finished) / self.seconds

    @property
    def output_throughput(self) -> float:
        """Their tokens a second."""
        return sum(record.tokens for record in self.finished) / self.seconds

    @property
    def goodput(self) -> float:
        """Requests a second that finished within the limits (the measure of DistServe, OSDI '24)."""
        return sum(map(self.limits.kept_by, self.records)) / self.seconds

    @property
    def ttft(self) -> list[float]:
        """Times to the first token, in seconds."""
        return [record.ttft for record in self.finished]

    @property
    def tpot(self) -> list[float]:
        """Times per token after the first: one mean for each request of two or more tokens."""
        return [record.tpot for record in self.finished if record.tpot is not None]

    @property
    def gaps(self) -> list[float]:
        """Times between two pieces of an answer, of all answers together: a stutter shows here and not in a mean."""
        return [float(gap) for record in self.finished for gap in np.diff(record.token_times)]

    @property
    def latency(self) -> list[float]:
        """Times to the end of the answer."""
        return [record.latency for record in self.finished]

    @property
    def lateness(self) -> list[float]:
        """Seconds between when each request was due and when the client got to send it."""
        return [record.sent - record.due for record in self.records]

    @property
    def little(self) -> float:
        """Requests in flight by Little's law: arrivals a second, times the mean time in the system."""
        return sum(record.ended - record.sent for record in self.records) / self.seconds


def percentiles(values: Sequence[float], *percents: float) -> list[float] | None:
    """Linearly interpolated, in the order asked for; None if there are no values."""
    if not values:
        return None
    found: list[float] = np.percentile(values, percents).tolist()
    return found
