"""Chapter 11: decode steps as CUDA graphs."""

from minisgl.graphs.choice import choose_runners
from minisgl.graphs.padding import graph_sizes, pad_batch
from minisgl.graphs.runner import GraphRunner, GraphRunners

__all__ = ["GraphRunner", "GraphRunners", "choose_runners", "graph_sizes", "pad_batch"]
