"""FlashInfer's attention kernels (Ye et al. 2025) behind our protocol: paged, and planned on the host.

FlashInfer balances the work of a step on the host: its ``plan`` cuts rows into pieces and copies the list of pieces to
the device, its ``run`` launches programs that take them from there. One plan serves all layers of a step that have as
many heads and the same window. Kernels are compiled when they are first used, which takes minutes, and kept on disk.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from flashinfer import BatchDecodeWithPagedKVCacheWrapper, BatchPrefillWithPagedKVCacheWrapper, fast_decode_plan

from minisgl.attention.page_lists import PageLists, host_tensor, page_lists
from minisgl.core import AttentionSpec, Batch, DeviceBatch
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.paged_attention import PagedAttention

_CUDA_CORE_GROUPS = (1, 2)
"""Query heads a KV head that are too few for tensor cores, whose tiles have 16 rows."""

_TINY = 1e-30
"""Stands for a scale of 0, by which the −∞ of an invisible position would become NaN."""


@dataclass(frozen=True, slots=True)
class LayerKind:
    """What of an `AttentionSpec` a plan depends on.

    Args:
        num_heads: query heads.
        window_left: positions that a token sees to the left of its own; −1 is all.
    """

    num_heads: int
    window_left: int

    @classmethod
    def of(cls, spec: AttentionSpec) -> LayerKind:
        """The kind of a layer."""
        return cls(spec.num_heads, -1 if spec.sliding_window is None else spec.sliding_window - 1)

    def plan_arguments(self, kv_cache: KVCache) -> tuple[tuple[int, ...], dict[str, Any]]:
        """What all plan functions take: sizes by position, options by name. The scale is given to `run`."""
        _, _, page_size, num_kv_heads, head_dim = kv_cache.k.shape
        dtype = kv_cache.k.dtype
        options = {"window_left": self.window_left, "q_data_type": dtype, "kv_data_type": dtype, "sm_scale": 1.0}
        return (self.num_heads, num_kv_heads, head_dim, page_size), options


class Workspace:
    """Memory for partial results. Kernels share it, since they run one after the other on one stream."""

    def __init__(self, device: torch.device) -> None:
        self.num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def get(self, kind: LayerKind, kv_cache: KVCache) -> torch.Tensor:
        """Room for all pieces of split rows: two a multiprocessor, each with at most 128 float32 outputs, and their
        log-sum-exps, for every query head of its KV head. Whoever got a smaller buffer before, keeps it."""
        num_kv_heads, head_dim = kv_cache.k.shape[3:]
        needed = 4 * (kind.num_heads // num_kv_heads) * 2 * self.num_sms * 128 * (head_dim + 1) + 4096
        if len(self._buffer) < needed:
            self._buffer = self._buffer.new_zeros(needed)
        return self._buffer


class StagedPlan:
    """Calls plan functions of one wrapper. They write to pinned memory of the wrapper and start a copy from there to
    the device, so each call waits for the end of the copy before."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __call__(self, plan: Callable[..., None], *args: Any, **options: Any) -> None:
        """Wait, and plan."""
        self._copied.synchronize()
        plan(*args, **options)
        self._copied.record()


class Kernel(Protocol):
    """Attends for rows of one phase, in layers of one kind."""

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """Prepare for one step."""
        ...

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """Attend.

        Args:
            q: [T, num_heads, head_dim].
            kv: keys and values of the layer, [pages, page_size, num_kv_heads, head_dim] each.
            scale: factor on q·k.
        """
        ...


class PrefillKernel:
    """FlashAttention 2 or 3, for rows of any number of tokens behind any prefix.

    Args:
        kind: of the layers.
        kv_cache: that they read.
        workspace: for partial results.
        version: ``"fa2"`` or ``"fa3"``.
    """

    def __init__(self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, version: str) -> None:
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace.get(kind, kv_cache), "NHD", backend=version)
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        self._staged = StagedPlan()

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """See `Kernel.plan`."""
        indptr = host_tensor(batch.cu_seqlens_q, lists.indices.device)
        pages = (lists.indptr, lists.indices, lists.last_page_len)
        longest = batch.max_q_len
        self._staged(
            self._wrapper.plan,
            *(indptr, *pages, *self._sizes),
            **self._options,
            causal=True,
            max_token_per_sequence=longest,
        )

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """See `Kernel.run`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, kv, q_scale=scale or _TINY, out=out)
        return out


class DecodeKernel:
    """One query token a row. A wrapper for each number of rows, so that its buffers keep their addresses and a CUDA
    graph that was captured over them stays valid: every plan for as many rows refreshes them.

    Args:
        kind: of the layers.
        kv_cache: that they read.
        workspace: for partial results.
        indices: where the page ids of every step are.
    """

    def __init__(self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, indices: torch.Tensor) -> None:
        self._memory = workspace.get(kind, kv_cache)
        self._indices = indices
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        num_kv_heads = self._sizes[1]
        self._tensor_cores = kind.num_heads // num_kv_heads not in _CUDA_CORE_GROUPS
        # With a program for every row and KV head the multiprocessors are busy; splitting rows would only add a merge.
        self._most_split_rows = 2 * workspace.num_sms // num_kv_heads
        self._by_rows: dict[int, FixedRows] = {}
        self._current: FixedRows

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """See `Kernel.plan`."""
        rows = batch.num_rows
        if rows not in self._by_rows:
            self._by_rows[rows] = FixedRows(rows, self._memory, self._indices, self._tensor_cores)
        self._current = self._by_rows[rows]
        self._current.plan(lists, self._sizes, disable_split_kv=rows > self._most_split_rows, **self._options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """See `Kernel.run`."""
        out: torch.Tensor = self._current.wrapper.run(q, kv, q_scale=scale or _TINY)
        return out


class FixedRows:
    """A decode wrapper and its buffers.

    Args:
        rows: of every step.
        memory: for partial results.
        indices: for page ids.
        tensor_cores: which kernel.
    """

    def __init__(self, rows: int, memory: torch.Tensor, indices: torch.Tensor, tensor_cores: bool) -> None:
        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=indices.device)
        self._last_page_len = torch.ones(rows, dtype=torch.int32, device=indices.device)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            memory,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=tensor_cores,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
        )
        # The list of pieces is short. A wrapper's own 8 MB would add up over many numbers of rows.
        self.wrapper.reset_workspace_buffer(memory, memory.new_empty(2**17 + 128 * rows))
        self._staged = StagedPlan()
        self._planned_before = False

    def plan(self, lists: PageLists, sizes: tuple[int, ...], **options: Any) -> None:
        """The first plan chooses and compiles the kernel. Later ones leave that out, and the copies, which are ours."""
        if self._planned_before:
            self._indptr.copy_(lists.indptr, non_blocking=True)
            self._last_page_len.copy_(lists.last_page_len, non_blocking=True)
            args = (fast_decode_plan, self.wrapper)
        else:
            args = (self.wrapper.plan,)
            self._planned_before = True
        self._staged(*args, lists.indptr, lists.indices, lists.last_page_len, *sizes, **options)


class FlashInferAttention(PagedAttention):
    """Attends for rows of one phase with FlashInfer.

    Layers make themselves known by attending. `plan` prepares for all kinds of layers that are known; a new kind is
    planned when it first attends, which cannot be while a CUDA graph is captured.

    Args:
        kv_cache: where keys and values live.
        make_kernel: for a new kind of layer; the tensor will hold the page ids of every step.
    """

    def __init__(self, kv_cache: KVCache, make_kernel: Callable[[LayerKind, torch.Tensor], Kernel]) -> None:
        super().__init__(kv_cache)
        self._make_kernel = make_kernel
        self._kernels: dict[LayerKind, Kernel] = {}
        self._indices = torch.empty(0, dtype=torch.int32, device=kv_cache.k.device)
        self._batch: Batch
        self._lists: PageLists

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """See `AttentionBackend.plan`."""
        self.inputs, self._batch = inputs, batch
        if len(self._indices) == 0:
            self._indices = torch.empty_like(inputs.page_table).view(-1)
        self._lists = page_lists(batch, inputs.page_table, self.kv_cache.page_size, self._indices)
        for kernel in self._kernels.values():
            kernel.plan(batch, self._lists)

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """See `PagedAttention.attend`."""
        kind = LayerKind.of(spec)
        if kind not in self._kernels:
            if torch.cuda.is_current_stream_capturing():
                raise RuntimeError("FlashInfer plans on the host: run the step once before capturing it in a CUDA graph")
            self._kernels[kind] = self._make_kernel(kind, self._indices)
            self._kernels[kind].plan(self._batch, self._lists)
        cache = self.kv_cache
        return self._kernels[kind].run(q, (cache.k[spec.layer_id], cache.v[spec.layer_id]), spec.scale)
