"""The Triton backend that reads a shared prefix once for all running requests that begin with it."""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch

from minisgl.attention.shared_prefix import PrefixGroups, SharedPrefixes
from minisgl.attention.triton_attention import TritonAttention
from minisgl.attention.triton_merge import PrefixParts
from minisgl.attention.triton_prefix import PrefixTables, attend_prefixes
from minisgl.core import AttentionSpec, Batch, DeviceBatch
from minisgl.engine.staging import to_device
from minisgl.kvcache.kv_cache import KVCache


class CascadeAttention(TritonAttention):
    """Decode rows in groups: first all rows of a group over their common prefix, then each over the rest of its keys.

    Groups form when a request with a cached prefix starts to decode and dissolve when it ends, so they are looked for
    at every step (`SharedPrefixes`), and reach the kernels as tensors whose address stays the same for as many rows. A
    layer with a sliding window is left as it is: what its rows see is no prefix.

    Args:
        kv_cache: where keys and values live.
        min_rows, min_tokens: smallest group, and shortest prefix, that are treated as one.
        min_saved: tokens that all groups of a step have to save together, for one launch more a layer to pay.
    """

    def __init__(self, kv_cache: KVCache, min_rows: int = 4, min_tokens: int = 256, min_saved: int = 8192) -> None:
        super().__init__(kv_cache)
        self.min_rows = min_rows
        self.min_tokens = min_tokens
        self.min_saved = min_saved
        self._prefixes: SharedPrefixes | None = None
        self._tables: dict[int, PrefixTables] = {}
        self._on_device: dict[int, PrefixGroups] = {}
        self._shared = False

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Find the groups. Answers ``"shared"`` if they save enough: one more kernel is launched then."""
        super().plan(batch, inputs)
        if self._prefixes is None:
            cache, (num_slots, width) = self.kv_cache, inputs.page_table.shape
            self._prefixes = SharedPrefixes(
                num_slots, width, cache.page_size, cache.num_pages, self.min_rows, self.min_tokens
            )
        groups = self._prefixes.update(batch)  # of every step: it follows the page table
        self._shared = len(groups) > 0 and groups.saved >= self.min_saved
        if not self._shared:
            return None
        if self._on_device.get(batch.num_decode) is not groups:
            self._upload(groups)
        return "shared"

    def _upload(self, groups: PrefixGroups) -> None:
        """Bring the groups to where the kernels read them, in one copy and in stream order: earlier steps may still
        run."""
        num_rows, device = len(groups.shared_lens), self.kv_cache.k.device
        most = max(1, num_rows // self.min_rows)
        last = groups.ends[-1]
        arrays = {
            "shared_lens": groups.shared_lens,
            "members": np.pad(groups.members, (0, num_rows - len(groups.members))),
            "ends": np.pad(groups.ends, (0, most - len(groups)), constant_values=last),
            "lens": np.pad(groups.lens, (0, most - len(groups))),
        }
        if num_rows not in self._tables:
            empty = {name: torch.empty(len(a), dtype=torch.int32, device=device) for name, a in arrays.items()}
            self._tables[num_rows] = PrefixTables(**empty)
        for name, tensor in to_device(arrays, device).items():
            getattr(self._tables[num_rows], name).copy_(tensor)
        self._on_device[num_rows] = groups

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        if self._shared and spec.sliding_window is None:
            tables = self._tables[len(q)]
            prefix = attend_prefixes(q, *self._layer(spec), self.inputs, spec, tables, self._num_sms)
        super()._decode(q, out, spec, prefix)
