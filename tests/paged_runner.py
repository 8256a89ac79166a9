"""A model over paged KV memory that is as unkind as an engine's."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.context import AttentionBackend
from minisgl.kvcache.pool import KVCache
from minisgl.models.config import ModelConfig
from tests.model_zoo import Runner


class PagedRunner(Runner):
    """Runs steps of a model over paged KV, without a scheduler.

    Unwritten KV memory holds NaN, so that a read of it shows. Pages are handed out in random order.

    Args:
        model: one of ours.
        cache: KV memory.
        rows: slots.
        max_len: longest sequence.
        backend: attention over ``cache``; None is `TorchAttention`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        cache: KVCache,
        rows: int,
        max_len: int,
        backend: AttentionBackend | None = None,
    ) -> None:
        self.cache = cache
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        width = -(-max_len // cache.page_size)
        pages = np.random.default_rng(5).permutation(cache.num_pages)[: rows * width]
        page_table = pages.reshape(rows, width).astype(np.int32)
        super().__init__(model, backend or TorchAttention(cache), page_table, cache.page_size)

    @classmethod
    def of(
        cls,
        model: torch.nn.Module,
        config: ModelConfig,
        dtype: torch.dtype,
        rows: int,
        max_len: int,
        page_size: int,
        kv_dtype: torch.dtype | None = None,
    ) -> PagedRunner:
        """With KV memory that fits the model and the rows."""
        pages = rows * -(-max_len // page_size)
        shape = (config.num_layers, config.num_kv_heads, config.head_dim, pages, page_size)
        return cls(model, KVCache(*shape, dtype, next(model.parameters()).device, kv_dtype), rows, max_len)
