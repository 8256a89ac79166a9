"""Recording a piece of work once, to replay it many times in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], tuple[torch.Tensor, ...]]
"""Computes some tensors from others, whose addresses never change."""


class Recording(Protocol):
    """Recorded work."""

    outputs: tuple[torch.Tensor, ...]
    """Where each replay leaves its results."""

    def replay(self) -> None:
        """Do the work again, with what its inputs hold now."""
        ...


class Recorder(Protocol):
    """Makes recordings."""

    def record(self, work: Work) -> Recording:
        """Run ``work`` at least once, and keep it."""
        ...


class CudaRecording:
    """A captured CUDA graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self.graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """One launch for all kernels."""
        self.graph.replay()


class CudaRecorder:
    """Captures CUDA graphs in one memory pool.

    They can share it because no two of them ever run at the same time. Before a capture the work runs once: libraries
    allocate workspaces, Triton compiles and cuBLAS chooses its kernels at the first call, and none of that may be
    recorded.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> CudaRecording:
        """See `Recorder.record`. What runs on the current stream comes first."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CudaRecording(graph, outputs)


class RerunRecording:
    """Stands for a graph where there is no GPU: does the work again, and moves the results to where they were."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """Run the work."""
        for kept, new in zip(self.outputs, self._work(), strict=True):
            kept.copy_(new)


class RerunRecorder:
    """Makes recordings that run on any device and save nothing, to look into and to test with."""

    def record(self, work: Work) -> RerunRecording:
        """See `Recorder.record`."""
        return RerunRecording(work)
