"""Which runner an engine gets."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.core.config import EngineConfig
from minisgl.engine.runner import EagerRunners, EngineParts, RunnerFactory
from minisgl.graphs.padding import graph_sizes
from minisgl.graphs.runner import GraphRunners, Model

_MAX_ROWS = 512


def choose_runners(
    config: EngineConfig,
    device: torch.device,
    single_token: Callable[[EngineParts], Model | None] | None = None,
) -> RunnerFactory:
    """CUDA graphs where there is CUDA, unless the options say otherwise; there every step runs eagerly.

    Args:
        config: ``enforce_eager``, ``graph_batches``, ``max_graph_batch`` and ``max_running_requests`` count.
        device: of the engine.
        single_token: as in `GraphRunners`.
    """
    if device.type != "cuda" or config.enforce_eager:
        return EagerRunners()
    largest = config.max_graph_batch or min(config.max_running_requests, _MAX_ROWS)
    return GraphRunners(config.graph_batches or graph_sizes(largest), single_token)
