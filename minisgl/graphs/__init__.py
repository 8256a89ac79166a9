"""Decode steps as CUDA graphs."""

from minisgl.graphs.capture import CpuGraph, CudaGraphPool
from minisgl.graphs.padding import graph_sizes, pad_batch
from minisgl.graphs.runner import CudaGraphRunner, build_runner, measure_graph_memory, sizes_to_capture

__all__ = [
    "CpuGraph",
    "CudaGraphPool",
    "CudaGraphRunner",
    "build_runner",
    "graph_sizes",
    "measure_graph_memory",
    "pad_batch",
    "sizes_to_capture",
]
