"""Times of GPU work without the host's share: the replay of a CUDA graph is timed."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterable, Sequence

import torch
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import DeviceType, ProfilerActivity, profile

from minisgl.errors import ConfigError

Call = Callable[[], object]

_CALLS_IN_GRAPH = 20
_REPLAYS = 11


def require_cuda(benchmark: str) -> None:
    """Raise `ConfigError` on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{benchmark}: times of GPU kernels need a CUDA device, and there is none here")


def microseconds(calls: Sequence[Call], before: Call | None = None) -> float:
    """Median time of one call, when the GPU launches each as soon as the one before has ended.

    The ``calls`` do the same work on different buffers; as many as `buffers_needed` says, so that the L2 cache holds no
    more of a buffer than it would in a model. ``before`` is launched in front of each measurement, and not timed.
    """
    for call in calls:  # compiling and other first-time work happens now
        call()
    rounds = max(_CALLS_IN_GRAPH // len(calls), 1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    graph.replay()
    return _median_micros(graph.replay, rounds * len(calls), before)


def eager_microseconds(calls: Sequence[Call]) -> float:
    """Median time of one call of work that cannot be captured in a graph; the host's share is part of it."""

    def run() -> None:
        for call in calls:
            call()

    return _median_micros(run, len(calls))


def _median_micros(run: Call, calls: int, before: Call | None = None) -> float:
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        if before is not None:
            before()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times)


def buffers_needed(bytes_moved: int) -> int:
    """How many sets of buffers `microseconds` should take turns through.

    One, if a set takes at most a quarter of the L2 cache: a model finds the activations of a decode step there too.
    Otherwise as many as take up twice the cache.
    """
    cache: int = torch.cuda.get_device_properties().L2_cache_size
    return 1 if bytes_moved <= cache // 4 else math.ceil(2 * cache / bytes_moved) + 1


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; a CPU has nothing to wait for."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(calls: Iterable[Call], device: torch.device) -> float:
    """Median time of the calls on host and device; the first warms up and is not counted."""
    times: list[float] = []
    for call in calls:
        synchronize(device)
        start = time.perf_counter()
        call()
        synchronize(device)
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[1:])


def launched(call: Call, device: torch.device) -> list[FunctionEvent]:
    """Kernels, copies and fills that one call starts; on a CPU, PyTorch's operators."""
    activities, kind = [ProfilerActivity.CPU], DeviceType.CPU
    if device.type == "cuda":
        activities, kind = [*activities, ProfilerActivity.CUDA], DeviceType.CUDA
    synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        synchronize(device)
    return [each for each in profiler.events() or [] if each.device_type == kind and each.cpu_parent is None]


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that flips the signs of a large tensor.

    A plain copy is not launched as a kernel, and is slower in a graph.
    """
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.neg(source, out=target)]) * 1e-6)
