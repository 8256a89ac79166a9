"""Records and requests made by hand."""

from __future__ import annotations

from typing import Any

from minisgl.bench.serve.records import Outcome, Record
from minisgl.bench.serve.workload import Planned


def planned(index: int = 0, **fields: Any) -> Planned:
    return Planned(**{"index": index, "input_len": 4, "output_len": 3, **fields})


def record(due: float, *token_times: float, tokens: int | None = None, **fields: Any) -> Record:
    """A request that finished with one token at each of these times, unless told otherwise."""
    defaults: dict[str, Any] = {
        "planned": planned(),
        "due": due,
        "sent": due,
        "ended": token_times[-1] if token_times else due,
        "outcome": Outcome.FINISHED,
        "status": 200,
        "token_times": list(token_times),
        "tokens": len(token_times) if tokens is None else tokens,
    }
    return Record(**{**defaults, **fields})
