"""Which decoder computes a decode step of how many rows."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch

from minisgl.core import DeviceBatch
from minisgl.engine.runner import EngineParts
from minisgl.kernels.single_token import SingleTokenDecoder
from minisgl.kernels.small_batch import SmallBatchDecoder
from minisgl.kvcache.paged_attention import PagedAttention

Model = Callable[[DeviceBatch], torch.Tensor]

SMALL_BATCH = 256
"""Most rows of a small batch, if the model is narrow: its products are over before many rows could slow them down."""
NARROW = 2048
"""Hidden size up to which it is. The products of a wider model are left to the library above `FEW_ROWS`."""
FEW_ROWS = 32


def choose_decoders(parts: EngineParts, fusions: Collection[str]) -> Callable[[int], Model]:
    """For a number of rows, what maps the inputs of a decode step to its logits.

    Args:
        parts: of the engine; its model is what everything else falls back to.
        fusions: names from `minisgl.kernels.FUSIONS`, of which ``"single-token"`` and ``"small-batch"`` count.
    """
    model = parts.model
    by_rows: list[tuple[int, Model]] = []
    if "single-token" in fusions and SingleTokenDecoder.supports(model):
        by_rows.append((1, SingleTokenDecoder(model, parts.kv_cache)))
    paged = isinstance(parts.attention, PagedAttention)
    if "small-batch" in fusions and paged and SmallBatchDecoder.supports(model):
        rows = SMALL_BATCH if model.config.hidden_size <= NARROW else FEW_ROWS
        by_rows.append((rows, SmallBatchDecoder(model)))

    def decoder(rows: int) -> Model:
        return next((decoder for most, decoder in by_rows if rows <= most), model)

    return decoder
