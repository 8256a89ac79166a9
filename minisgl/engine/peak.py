"""How much memory a piece of work needs at its worst moment."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

_SAMPLING_INTERVAL_S = 0.005


@dataclass(slots=True)
class Peak:
    """Bytes that this process had allocated on a device: at the worst moment of a block, and after it."""

    peak: int = 0
    current: int = 0


@contextmanager
def measure_peak(device: torch.device) -> Iterator[Peak]:
    """Fill in the yielded `Peak` when the block ends.

    On CUDA the allocator keeps the books. For main memory, the resident size of the process is sampled every 5 ms,
    so a peak that is shorter may be missed.
    """
    result = Peak()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        torch.cuda.synchronize(device)
        result.peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.empty_cache()
        result.current = torch.cuda.memory_allocated(device)
        return
    process = psutil.Process()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_SAMPLING_INTERVAL_S):
            result.peak = max(result.peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield result
    finally:
        done.set()
        sampler.join()
    result.current = process.memory_info().rss
    result.peak = max(result.peak, result.current)
