"""What became of each request, as its client saw it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from minisgl.bench.serve.workload import Planned


class Outcome(StrEnum):
    """How a request ended."""

    FINISHED = "finished"
    """With as many tokens as it asked for."""
    REFUSED = "error body"
    """With an error in the shape of OpenAI's API in place of an answer."""
    FAILED = "error event"
    """With such an error in the middle of its stream."""
    LEFT = "client left"
    """By its own client, as planned."""
    WRONG_LENGTH = "wrong length"
    """With another number of tokens than it asked for."""
    UNREADABLE = "unreadable"
    """With an answer, or an error, that is not what the API says."""
    CLOSED = "connection closed"
    """In the middle of an answer, or before it."""
    UNREACHABLE = "no connection"
    """Before it began."""
    TIMEOUT = "timeout"
    """Not at all, in the time that the client had."""


@dataclass(slots=True)
class Record:
    """One request and its answer. Times are seconds of `time.perf_counter`.

    Args:
        planned: what was sent.
        due: when it should have been sent: what a user waits counts from here.
        sent: when it was.
        ended: when its client knew the outcome.
        outcome: how it ended.
        status: of HTTP; 0 if none came.
        message: of the error, if there was one.
        token_times: when each piece of text arrived, one or more tokens each.
        tokens: generated, as the server counts them; 0 if it did not say.
    """

    planned: Planned
    due: float
    sent: float
    ended: float
    outcome: Outcome
    status: int = 0
    message: str = ""
    token_times: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def answered(self) -> bool:
        """Whether the server did its duty: tokens as asked or a typed error, and 4xx for a body that is wrong."""
        if self.planned.malformed is not None:
            return self.outcome is Outcome.REFUSED and 400 <= self.status < 500
        return self.outcome in (Outcome.FINISHED, Outcome.REFUSED, Outcome.FAILED, Outcome.LEFT)

    @property
    def ttft(self) -> float:
        """Time to first token: seconds from when it was due to its first piece of text. Has one if it finished."""
        return self.token_times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Time per output token after the first, in seconds; None if there is one token only."""
        return None if self.tokens < 2 else (self.token_times[-1] - self.token_times[0]) / (self.tokens - 1)

    @property
    def latency(self) -> float:
        """Seconds from when it was due to its end."""
        return self.ended - self.due
