"""FlashInfer as an attention backend: one kernel for prefill rows, another for decode rows."""

from __future__ import annotations

from collections.abc import Callable

import torch

from minisgl.attention.flashinfer_kernels import (
    DecodeKernel,
    Kernel,
    LayerKind,
    PrefillKernel,
    Scratch,
    Workspace,
    fastest_version,
)
from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.page_lists import PageLists, page_lists
from minisgl.core import AttentionSpec, Batch, DeviceBatch
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.paged_attention import PagedAttention


def flashinfer_attention(kv_cache: KVCache, version: str | None = None) -> HybridAttention:
    """FlashInfer for whole steps.

    Args:
        kv_cache: where keys and values live.
        version: of FlashAttention in prefill, ``"fa2"`` or ``"fa3"``; None is the faster one for each step.

    Raises:
        ConfigError: version 3 on a GPU that is not a Hopper.
    """
    is_hopper = torch.cuda.get_device_capability(kv_cache.k.device) == (9, 0)
    if version == "fa3" and not is_hopper:
        raise ConfigError(
            "prefill_attention, decode_attention: 'flashinfer-fa3' needs a Hopper GPU; choose 'flashinfer-fa2'"
        )
    workspace = Workspace(kv_cache.k.device)

    def choose_version(batch: Batch) -> str:
        return version or (fastest_version(batch) if is_hopper else "fa2")

    def prefill_kernel(kind: LayerKind, scratch: Scratch) -> Kernel:
        return PrefillKernel(kind, kv_cache, workspace, choose_version)

    def decode_kernel(kind: LayerKind, scratch: Scratch) -> Kernel:
        return DecodeKernel(kind, kv_cache, workspace, scratch)

    return HybridAttention(
        kv_cache,
        prefill=FlashInferAttention(kv_cache, prefill_kernel, capturable=False),
        decode=FlashInferAttention(kv_cache, decode_kernel, capturable=True),
    )


class FlashInferAttention(PagedAttention):
    """Attends for rows of one phase with FlashInfer.

    Layers make themselves known by attending. `plan` prepares for all kinds of layers that are known; a new kind is
    planned when it first attends, which cannot be while a CUDA graph is captured.

    Args:
        kv_cache: where keys and values live.
        make_kernel: for a new kind of layer.
        capturable: whether its kernels keep what a CUDA graph reads at one address.
    """

    def __init__(
        self, kv_cache: KVCache, make_kernel: Callable[[LayerKind, Scratch], Kernel], capturable: bool
    ) -> None:
        super().__init__(kv_cache)
        self.capturable = capturable
        self._make_kernel = make_kernel
        self._kernels: dict[LayerKind, Kernel] = {}
        self._scratch: Scratch | None = None
        self._batch: Batch
        self._lists: PageLists

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """See `AttentionBackend.plan`."""
        self.inputs, self._batch = inputs, batch
        if batch.num_rows == 0:
            return
        self._scratch = self._scratch or Scratch.for_table(inputs.page_table)
        self._lists = page_lists(batch, inputs.page_table, self.kv_cache.page_size, self._scratch.indices)
        for kernel in self._kernels.values():
            kernel.plan(batch, self._lists)

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        kind = LayerKind.of(spec)
        if kind not in self._kernels:
            self._kernels[kind] = self._plan_first(kind)
        keys_and_values = self.kv_cache.k[spec.layer_id], self.kv_cache.v[spec.layer_id]
        return self._kernels[kind].run(q, keys_and_values, spec.scale)

    def _plan_first(self, kind: LayerKind) -> Kernel:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInfer plans on the host: run the step once before it is captured in a CUDA graph")
        assert self._scratch is not None, "attend comes after plan"
        kernel = self._make_kernel(kind, self._scratch)
        kernel.plan(self._batch, self._lists)
        return kernel
