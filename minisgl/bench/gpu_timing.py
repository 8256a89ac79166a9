"""Times of GPU work without the host's share: what is timed is the replay of a CUDA graph."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from torch.profiler import ProfilerActivity, profile

Call = Callable[[], object]

_CALLS_IN_GRAPH = 20
_REPLAYS = 11


def microseconds(calls: Sequence[Call]) -> float:
    """Median time of one call.

    Calls are recorded one after the other in one graph, so that each is launched by the GPU itself when the one before
    has ended.

    Args:
        calls: the same work on different buffers, taking turns; enough of them that a buffer is no longer in the L2
            cache when its turn comes again, where the work would not find it there in a model.
    """
    for call in calls:  # whatever happens once, such as compiling, happens now
        call()
    rounds = max(_CALLS_IN_GRAPH // len(calls), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / (rounds * len(calls)))
    return statistics.median(times)


def eager_microseconds(calls: Sequence[Call]) -> float:
    """Median time of one call for work that cannot be recorded in a graph: the host's share is part of it."""
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / len(calls))
    return statistics.median(times)


def buffers_needed(bytes_moved: int) -> int:
    """How many sets of buffers `microseconds` should turn through.

    One, if a set takes no more than a quarter of the L2 cache: the activations of a decode step are found there in a
    model too. Otherwise as many as take up twice the cache.
    """
    cache: int = torch.cuda.get_device_properties().L2_cache_size
    return 1 if bytes_moved <= cache // 4 else math.ceil(2 * cache / bytes_moved) + 1


def launches(call: Call) -> int:
    """Kernels, copies and fills that one call starts."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.profiler.DeviceType.CUDA for event in recorded.events() or [])


def copy_bandwidth() -> float:
    """Bytes a second that a kernel moves which reads a large tensor once and writes another, the two added up.

    The kernel flips signs. A plain copy is not launched as a kernel and is slower in a graph.
    """
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.neg(source, out=target)]) * 1e-6)
