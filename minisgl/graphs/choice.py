"""Which runner an engine gets."""

from __future__ import annotations

from collections.abc import Collection

import torch

from minisgl.core.config import EngineConfig
from minisgl.engine.runner import EagerRunners, RunnerFactory
from minisgl.graphs.padding import graph_sizes
from minisgl.graphs.runner import GraphRunners
from minisgl.kernels.choice import has_triton

_MAX_ROWS = 512


def choose_runners(config: EngineConfig, device: torch.device, fusions: Collection[str] = ()) -> RunnerFactory:
    """CUDA graphs where there is CUDA, unless the options say otherwise; there every step runs eagerly.

    Args:
        config: ``enforce_eager``, ``graph_batches``, ``max_graph_batch`` and ``max_running_requests`` count.
        device: of the engine.
        fusions: names from `minisgl.kernels.FUSIONS`, of which those of whole decoders count.
    """
    if device.type != "cuda" or config.enforce_eager:
        return EagerRunners()
    largest = config.max_graph_batch or min(config.max_running_requests, _MAX_ROWS)
    sizes = config.graph_batches or graph_sizes(largest)
    if not has_triton():
        return GraphRunners(sizes)
    from minisgl.graphs.fused_buffers import FusedDecodeBuffers
    from minisgl.kernels.decoders import choose_decoders

    return GraphRunners(sizes, FusedDecodeBuffers, lambda parts: choose_decoders(parts, fusions))
