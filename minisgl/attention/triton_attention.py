"""The backend made of our own Triton kernels."""

from __future__ import annotations

from collections.abc import Hashable

import torch
import triton

from minisgl.attention.triton_decode import decode
from minisgl.attention.triton_merge import PrefixParts
from minisgl.attention.triton_prefill import QueryTiles, prefill, query_tiles
from minisgl.attention.triton_support import TRITON_DTYPES
from minisgl.core import AttentionSpec, Batch, DeviceBatch
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.paged_attention import PagedAttention

_INTERPRETED_SMS = 2
"""Multiprocessors that the interpreter pretends to have; it runs one program after another."""


class TritonAttention(PagedAttention):
    """Decode rows by `decode_kernel`, prefill rows by `prefill_kernel`.

    Decode steps need no plan: their kernel reads lengths and pages from the step's tensors.

    Args:
        kv_cache: where keys and values live.

    Raises:
        ConfigError: the cache is not on a CUDA device, and Triton's interpreter is off.
    """

    capturable = True

    def __init__(self, kv_cache: KVCache) -> None:
        super().__init__(kv_cache)
        device, dtype = kv_cache.k.device, kv_cache.dtype
        if dtype not in TRITON_DTYPES:
            raise ConfigError(
                "prefill_attention, decode_attention: the Triton kernels compute float16, bfloat16 and float32, the "
                f"model is {str(dtype).removeprefix('torch.')}; choose 'torch'"
            )
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        elif triton.knobs.runtime.interpret:
            self._num_sms = _INTERPRETED_SMS
        else:
            raise ConfigError(
                "prefill_attention, decode_attention: the Triton kernels need a CUDA device, the KV cache is on "
                f"{device.type!r}; choose 'torch', or set TRITON_INTERPRET=1 before Triton is imported to run them "
                "slowly on the CPU"
            )
        self._batch: Batch
        self._query_tiles: dict[int, QueryTiles] = {}

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        """Start a step. Prefill rows are cut up by the first layer, which knows how many query heads there are."""
        self._batch, self.inputs = batch, inputs
        self._query_tiles.clear()
        return None

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        q = q if q.stride(-1) == 1 else q.contiguous()
        out = q.new_empty(q.shape)
        num_decode = self._batch.num_decode
        if num_decode > 0:
            self._decode(q[:num_decode], out[:num_decode], spec)
        if num_decode < self._batch.num_rows:
            group = spec.num_heads // spec.num_kv_heads
            if group not in self._query_tiles:
                self._query_tiles[group] = query_tiles(self._batch, group, q)
            prefill(q, out, *self._layer(spec), self.inputs, spec, self._query_tiles[group])
        return out

    def _decode(
        self, q: torch.Tensor, out: torch.Tensor, spec: AttentionSpec, prefix: PrefixParts | None = None
    ) -> None:
        decode(q, out, *self._layer(spec), self.inputs, spec, self._num_sms, prefix)

    def _layer(self, spec: AttentionSpec) -> tuple[torch.Tensor, torch.Tensor]:
        return self.kv_cache.k[spec.layer_id], self.kv_cache.v[spec.layer_id]
