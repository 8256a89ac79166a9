"""Which requests are sent: lengths, times of arrival, and which of them misbehave. All of it follows from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from minisgl.bench.serve.arrivals import Times, constant, poisson, scaled
from minisgl.bench.serve.bodies import MALFORMED
from minisgl.bench.serve.errors import LoadError
from minisgl.bench.serve.traces import Blocks, TraceRequest, read_trace

Range = tuple[int, int]
"""The least and the most."""


@dataclass(frozen=True, slots=True)
class Planned:
    """A request before it is sent.

    Args:
        index: unique in a run; its prompt depends on it.
        input_len, output_len: tokens of the prompt, and to generate.
        due: seconds after the beginning at which it is sent in an open loop.
        blocks: that the prompt is made of, if it comes from a trace.
        leave_after: pieces of the answer after which the client disconnects; 0 is as soon as the request is written.
            None stays to the end.
        malformed: what is wrong with its body, a name in `MALFORMED`; None if nothing is.
        stream: whether the answer comes in pieces.
    """

    index: int
    input_len: int
    output_len: int
    due: float = 0.0
    blocks: Blocks | None = None
    leave_after: int | None = None
    malformed: str | None = None
    stream: bool = True


@dataclass(frozen=True, slots=True)
class Workload:
    """What is sent, whatever the load.

    Args:
        requests: how many; None is all of the trace, or 100.
        input_len, output_len: tokens of prompts and answers, uniformly distributed. A trace has its own.
        arrivals: ``"poisson"`` or ``"constant"`` in an open loop.
        trace: file of recorded requests, in place of the lengths and the arrivals.
        disconnects: share of the requests whose client leaves before the end.
        malformed: share of the requests whose body is wrong.
        seed: of everything.
    """

    requests: int | None = None
    input_len: Range = (128, 128)
    output_len: Range = (64, 64)
    arrivals: str = "poisson"
    trace: Path | None = None
    disconnects: float = 0.0
    malformed: float = 0.0
    seed: int = 0

    def plan(self, rate: float | None, run: int) -> list[Planned]:
        """The requests of one run.

        Args:
            rate: requests a second; None keeps the times of a trace, and is no time at all in a closed loop.
            run: number of the run; lengths, gaps and faults are drawn anew for each.

        Raises:
            LoadError: the trace cannot be read, or is too short.
        """
        rng = np.random.default_rng([self.seed, run])
        requests = self._recorded() if self.trace else self._random(rng)
        times = self._times(requests, rate, rng)
        on_time = [replace(each, due=float(due)) for each, due in zip(requests, times, strict=True)]
        return _with_faults(on_time, self.disconnects, self.malformed, rng)

    def _random(self, rng: np.random.Generator) -> list[Planned]:
        count = 100 if self.requests is None else self.requests
        inputs, outputs = (
            rng.integers(least, most, size=count, endpoint=True).tolist()
            for least, most in (self.input_len, self.output_len)
        )
        return [Planned(index, *lengths) for index, lengths in enumerate(zip(inputs, outputs, strict=True))]

    def _recorded(self) -> list[Planned]:
        assert self.trace is not None
        lines = read_trace(self.trace)
        if self.requests is not None and self.requests > len(lines):
            raise LoadError(f"requests: {self.trace} has {len(lines)}, got {self.requests}; ask for fewer")
        return [_planned(index, line) for index, line in enumerate(lines[: self.requests])]

    def _times(self, requests: Sequence[Planned], rate: float | None, rng: np.random.Generator) -> Times:
        recorded: Times = np.array([each.due for each in requests]) - requests[0].due
        if rate is None:
            return recorded
        if self.trace:
            return scaled(recorded, rate)
        return poisson(rate, len(requests), rng) if self.arrivals == "poisson" else constant(rate, len(requests))


def _planned(index: int, line: TraceRequest) -> Planned:
    return Planned(index, line.input_len, line.output_len, due=line.arrival, blocks=line.blocks)


def _with_faults(
    requests: list[Planned], disconnects: float, malformed: float, rng: np.random.Generator
) -> list[Planned]:
    """Exactly these shares of the requests, rounded, chosen at random; none of them has both faults."""
    order = rng.permutation(len(requests)).tolist()
    leaving = round(disconnects * len(requests))
    wrong = round(malformed * len(requests))
    names = list(MALFORMED)
    for index in order[:leaving]:
        pieces = int(rng.integers(0, requests[index].output_len))
        requests[index] = replace(requests[index], leave_after=pieces, stream=True)
    for number, index in enumerate(order[leaving : leaving + wrong]):
        requests[index] = replace(requests[index], malformed=names[number % len(names)])
    return requests
