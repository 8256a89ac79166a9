"""How long GPU work takes: measured without the host's share, by the replay of a CUDA graph, and the least it can take.

The least is by the roofline model of Williams, Waterman and Patterson (2009): bytes at the memory's speed or operations
at the arithmetic's, and a fixed cost for each kernel.
"""

from __future__ import annotations

import math
import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from minisgl.batch import Batch
from minisgl.errors import ConfigError
from minisgl.models.config import ModelConfig

Call = Callable[[], object]

_CALLS_IN_GRAPH = 20
_REPLAYS = 11


def require_cuda(benchmark: str) -> None:
    """Raise `ConfigError` on a machine without a CUDA device."""
    if not torch.cuda.is_available():
        raise ConfigError(f"{benchmark}: times of GPU kernels need a CUDA device, and there is none here")


def microseconds(calls: Sequence[Call], before: Call = lambda: None) -> float:
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
    return _median_micros(lambda: [call() for call in calls], len(calls))


def _median_micros(run: Call, calls: int, before: Call = lambda: None) -> float:
    times: list[float] = []
    for _ in range(_REPLAYS):
        start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        before()
        start.record()
        run()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1000 / calls)
    return statistics.median(times)


def buffers_needed(bytes_moved: int) -> int:
    """How many sets of buffers `microseconds` should take turns through: as many as take up twice the L2 cache.

    One, if a set takes at most a quarter of it: a model finds the activations of a decode step there too.
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


class Launch(NamedTuple):
    """A kernel, a copy or a fill: when it began and ended, in microseconds."""

    name: str  # without types and namespaces
    start: float
    end: float


def launched(call: Call, device: torch.device) -> list[Launch]:
    """Kernels, copies and fills that one call starts, in order; on a CPU, PyTorch's operators."""
    activities, kind = [ProfilerActivity.CPU], DeviceType.CPU
    if device.type == "cuda":
        activities, kind = [*activities, ProfilerActivity.CUDA], DeviceType.CUDA
    synchronize(device)
    with profile(activities=activities, acc_events=True) as profiler:
        call()
        synchronize(device)
    launches: list[Launch] = []
    for event in profiler.events() or []:
        if event.device_type == kind and event.cpu_parent is None:
            plain = re.sub(r"<.*", "", event.name.replace("(anonymous namespace)::", ""), flags=re.DOTALL)
            name = plain.split("(")[0].strip().rsplit("::", 1)[-1].removeprefix("void ")
            launches.append(Launch(name, event.time_range.start, event.time_range.end))
    return sorted(launches, key=lambda launch: launch.start)


def copy_bandwidth() -> float:
    """Bytes read and written per second by a kernel that flips signs, as a plain copy is slower in a graph."""
    source = torch.randn(2**30, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.nbytes / (microseconds([lambda: torch.neg(source, out=target)]) * 1e-6)


class Work(NamedTuple):
    """Bytes to move (each once), floating-point operations, and the number of kernels that do it."""

    name: str
    bytes: int
    flops: int
    kernels: int = 0

    @property
    def intensity(self) -> float:
        """Operations per byte."""
        return self.flops / self.bytes


class Machine(NamedTuple):
    """A device in three numbers."""

    name: str  # of the device
    bytes_per_second: float  # that a copy moves, reads and writes added up
    flops_per_second: float  # of a large matrix product
    kernel_seconds: float = 0.0  # beyond bytes and operations: to start a kernel, to fill the device and drain it

    @property
    def ridge(self) -> float:
        """Operations per byte at which moving and computing take equally long."""
        return self.flops_per_second / self.bytes_per_second

    def seconds(self, work: Work) -> float:
        """The longer of moving and computing, plus the cost of the kernels."""
        longest = max(work.bytes / self.bytes_per_second, work.flops / self.flops_per_second)
        return longest + work.kernels * self.kernel_seconds


H200 = Machine("NVIDIA H200", 4.3e12, 790e12)  # in bfloat16, as the benchmarks measure a large copy and matrix product


def step_work(model: ModelConfig, batch: Batch, kv_tokens: int | None = None) -> tuple[Work, Work, Work]:
    """The work of one step of a dense decoder: the layers' matrices, attention, and the scores of the vocabulary.

    Weights are counted once, keys and values once for each row, activations not at all. A layer is ten kernels: two
    norms, four products, one activation, one that rotates and stores, and attention in two parts.

    Every row reads the keys and values of its whole sequence, unless ``kv_tokens`` counts the positions that are read.
    """
    if model.moe is not None:
        raise ConfigError("model: the work of a mixture depends on which experts are chosen; use a dense model")
    width, layers = model.dtype.itemsize, model.num_layers
    heads, kv_heads = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    weights = layers * model.hidden_size * (2 * heads + 2 * kv_heads + 3 * model.intermediate_size)
    vocabulary = model.vocab_size * model.hidden_size
    fed = batch.q_lens.astype(np.int64)
    seen = int((fed * (batch.seq_lens - fed) + fed * (fed + 1) // 2).sum())
    kv_tokens = int(batch.seq_lens.sum()) if kv_tokens is None else kv_tokens
    return (
        Work("matrices", weights * width, 2 * weights * batch.num_tokens, 8 * layers),
        Work("attention", 2 * layers * kv_heads * width * kv_tokens, 4 * layers * heads * seen, 2 * layers),
        Work("scores", vocabulary * width, 2 * vocabulary * len(batch.sample_rows), 2),
    )
