"""Capturing a piece of work once, to replay it many times in the same memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

Work = Callable[[], tuple[torch.Tensor, ...]]
"""Computes some tensors from others, whose addresses never change."""


class CapturedGraph(Protocol):
    """Captured work."""

    outputs: tuple[torch.Tensor, ...]
    """Where each replay leaves its results."""

    def replay(self) -> None:
        """Do the work again, with what its inputs hold now."""
        ...


GraphCapture = Callable[[Work], CapturedGraph]
"""Runs some work at least once, and keeps it: `CudaGraphPool.capture` on a GPU, the class `CpuGraph` elsewhere."""


class CudaGraph:
    """A captured CUDA graph: the driver's list of kernels, with all of their arguments."""

    def __init__(self, graph: torch.cuda.CUDAGraph, outputs: tuple[torch.Tensor, ...]) -> None:
        self.graph = graph
        self.outputs = outputs

    def replay(self) -> None:
        """Launch all kernels at once."""
        self.graph.replay()


class CudaGraphPool:
    """Captures CUDA graphs in one memory pool, which they can share because no two of them ever run at the same time.

    Args:
        device: where the work runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, work: Work) -> CudaGraph:
        """Run ``work`` once, then capture it. What runs on the current stream comes first.

        At its first call work does more than at later ones: libraries allocate workspaces, Triton compiles, cuBLAS
        chooses its kernels. None of that may be captured.
        """
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            work()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
            outputs = work()
        torch.cuda.current_stream().wait_stream(self._stream)
        return CudaGraph(graph, outputs)


class CpuGraph:
    """Stands for a graph where there is no GPU. It keeps the work itself in place of a list of kernels: a replay calls
    it again, Python and all, and moves the results to where they were. It saves nothing, and shows everything else."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.outputs = work()

    def replay(self) -> None:
        """Call the work."""
        for kept, new in zip(self.outputs, self._work(), strict=True):
            kept.copy_(new)
