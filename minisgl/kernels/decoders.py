"""Which decoder computes a decode step of how many rows."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from minisgl.core import DeviceBatch
from minisgl.engine.runner import EngineParts
from minisgl.kernels.single_token import SingleTokenDecoder

Model = Callable[[DeviceBatch], torch.Tensor]


def choose_decoders(parts: EngineParts, fusions: Collection[str]) -> Callable[[int], Model]:
    """For a number of rows, what maps the inputs of a decode step to its logits.

    Args:
        parts: of the engine; its model is what everything else falls back to.
        fusions: names from `minisgl.kernels.FUSIONS`, of which ``"single-token"`` counts.
    """
    model = parts.model
    if "single-token" not in fusions or not SingleTokenDecoder.supports(model):
        return lambda rows: model
    single = SingleTokenDecoder(model, parts.kv_cache)
    return lambda rows: single if rows == 1 else model
