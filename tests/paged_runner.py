"""A model over paged KV memory that is as unkind as an engine's."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from minisgl.attention.torch_backend import TorchAttention
from minisgl.context import AttentionBackend
from minisgl.kvcache.pool import KVCache
from minisgl.layers.sharding import SINGLE_RANK, Communicator, divide_kv_heads
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
        ranks: Communicator = SINGLE_RANK,
    ) -> PagedRunner:
        """With KV memory that fits the model, or this rank's share of it, and the rows."""
        pages = rows * -(-max_len // page_size)
        kv_heads = divide_kv_heads(config.num_kv_heads, ranks).size
        shape = (config.num_layers, kv_heads, config.head_dim, pages, page_size)
        return cls(model, KVCache(*shape, dtype, next(model.parameters()).device, kv_dtype), rows, max_len)

    def in_pieces(
        self, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], c: np.ndarray[Any, Any]
    ) -> list[torch.Tensor]:
        """[len, vocab] logits of 30, 21 and 12 tokens, in chunks, decode rows, and steps of both, in slots 0 to 2."""
        steps = [
            {0: a[:7]},
            {0: a[7:14], 1: b[:3]},
            {1: b[3:4], 0: a[14:27], 2: c[:11]},  # decode, two prefills with and without a prefix
            {0: a[27:28], 1: b[4:5], 2: c[11:12]},
            {1: b[5:21], 0: a[28:29]},
            {0: a[29:30]},
        ]
        got: list[list[torch.Tensor]] = [[], [], []]
        for fed in steps:
            for slot, logits in zip(fed, self.step(fed), strict=True):
                got[slot].append(logits)
        return [torch.cat(pieces) for pieces in got]
