"""Runs a conversation through a real scheduler over a prefix cache, and says what each step was told to compute.

    python -m assignments.bug_hunt.trace_engine module:Class trace.json

The second argument is where to write the trace for https://ui.perfetto.dev.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from minisgl.bench.host import NullExecutor
from minisgl.kvcache.prefix import PREFIX_CACHES, PrefixCache
from minisgl.registry import resolve
from minisgl.request import Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler
from minisgl.table import RunningTable
from minisgl.trace import Trace, recorded

PAGE_SIZE = 4
TURNS = 6
TURN_TOKENS = 21


def trace_conversation(make_cache: Callable[[int], PrefixCache]) -> Trace:
    """A user sends a conversation that is `TURN_TOKENS` longer each time, and waits for two tokens of answer."""
    table = RunningTable(4, 512)
    scheduler = Scheduler(table, KVMemory(256, table, make_cache(PAGE_SIZE)), Policies())
    loop = EngineLoop(scheduler, NullExecutor())
    tokens = np.random.default_rng(0).integers(0, 1000, TURNS * TURN_TOKENS, dtype=np.int32)
    trace = Trace()
    with recorded(trace, loop):
        for turn in range(TURNS):
            prompt = tokens[: (turn + 1) * TURN_TOKENS]
            scheduler.add(Request(turn, prompt, SamplingParams(max_tokens=2), len(prompt) + 2))
            while scheduler.has_work:
                loop.step()
    return trace


def launches(trace: Trace) -> list[dict[str, Any]]:
    """What was launched, step by step: see `minisgl.trace.recorded`."""
    return [event.args for event in trace.events if event.name == "launch"]


def main() -> None:
    """Print a line a step, and write the trace."""
    path, file = sys.argv[1:]
    trace = trace_conversation(resolve("prefix_cache", path, PREFIX_CACHES))
    for step in launches(trace):
        kind = "decode" if step["decode"] else "prefill"
        print(f"step {step['step']:2}: {kind:7} of request {step['uids']}: fed {step['fed']}, cached {step['cached']}")
    trace.export(file)


if __name__ == "__main__":
    main()
