"""What all attention backends over paged KV have in common: first store, then attend."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Hashable

import torch

from minisgl.core import AttentionSpec, Batch, DeviceBatch, PagedAttentionBackend
from minisgl.kvcache.kv_cache import KVCache


class PagedAttention(PagedAttentionBackend):
    """An `AttentionBackend` over a `KVCache`. Only positions that were written are ever read. What is read is converted
    to the dtype of the queries, which the cache may be narrower than.

    Args:
        kv_cache: where keys and values live.
    """

    kv_cache: KVCache
    capturable: bool = False

    def __init__(self, kv_cache: KVCache) -> None:
        self.kv_cache = kv_cache
        self.inputs: DeviceBatch
        """Of the current step."""

    @abstractmethod
    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """See `AttentionBackend.plan`. Sets ``inputs``."""

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Store all rows' keys and values first: a row may read pages that another row of the step writes."""
        self.kv_cache.store(spec.layer_id, k, v, self.inputs.out_locs)
        return self.attend(q, spec)
