"""Which runner an engine gets."""

from __future__ import annotations

from collections.abc import Collection

import torch

from minisgl.core.config import EngineConfig
from minisgl.engine.runner import EagerRunners, EngineParts, RunnerFactory
from minisgl.graphs.buffers import DecodeBuffers
from minisgl.graphs.padding import graph_sizes
from minisgl.graphs.runner import GraphRunners, Model
from minisgl.kernels.choice import has_triton

_MAX_ROWS = 512


def choose_runners(config: EngineConfig, device: torch.device, fusions: Collection[str] = ()) -> RunnerFactory:
    """CUDA graphs where there is CUDA, unless the options say otherwise; there every step runs eagerly.

    Args:
        config: ``enforce_eager``, ``graph_batches``, ``max_graph_batch`` and ``max_running_requests`` count.
        device: of the engine.
        fusions: names from `minisgl.kernels.FUSIONS`, of which ``"single-token"`` counts.
    """
    if device.type != "cuda" or config.enforce_eager:
        return EagerRunners()
    largest = config.max_graph_batch or min(config.max_running_requests, _MAX_ROWS)
    sizes = config.graph_batches or graph_sizes(largest)
    return GraphRunners(sizes, _buffers(), _single_token if "single-token" in fusions else None)


def _buffers() -> type[DecodeBuffers]:
    if not has_triton():
        return DecodeBuffers
    from minisgl.graphs.fused_buffers import FusedDecodeBuffers

    return FusedDecodeBuffers


def _single_token(parts: EngineParts) -> Model | None:
    from minisgl.kernels.single_token import SingleTokenDecoder

    return SingleTokenDecoder(parts.model, parts.kv_cache) if SingleTokenDecoder.supports(parts.model) else None
