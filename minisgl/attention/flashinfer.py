"""FlashInfer's paged attention as a backend (Ye et al. 2025).

FlashInfer has a *wrapper* for each phase: ``plan`` cuts rows into pieces on the host, once a step for each kind of
layer, and ``run`` launches a layer's kernels. FlashInfer itself is imported only where wrappers are made.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from minisgl.attention.hybrid import HybridAttention
from minisgl.attention.torch_backend import PagedAttention
from minisgl.batch import Batch, DeviceBatch, to_device
from minisgl.context import AttentionSpec
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.request import Int32Array

# FlashInfer gives hidden positions a score of −50,000 before it scales; with a smaller scale they would be seen.
_MIN_SCALE = 2e-3
_FA3_TILE = 128  # queries of a row that FlashAttention 3 attends for in one program


def flashinfer_attention(kv_cache: KVCache, version: str | None = None) -> HybridAttention:
    """Build the backend: FlashInfer's prefill kernels for prefill rows, its decode kernels for decode rows.

    ``version`` is that of FlashAttention in prefill, ``"fa2"`` or ``"fa3"``; None takes the faster one for each step.
    Raises `ConfigError` for version 3 on a GPU that is not a Hopper.
    """
    is_hopper = torch.cuda.get_device_capability(kv_cache.k.device) == (9, 0)
    if version == "fa3" and not is_hopper:
        raise ConfigError(
            "prefill_attention, decode_attention: 'flashinfer-fa3' needs a Hopper GPU; choose 'flashinfer-fa2'"
        )
    workspace = Workspace(kv_cache.k.device)

    def choose_version(batch: Batch) -> str:
        return version or (fastest_version(batch) if is_hopper else "fa2")

    def make_prefill(kind: LayerKind, indices: torch.Tensor) -> Kernel:
        return PrefillKernel(kind, kv_cache, workspace, choose_version)

    def make_decode(kind: LayerKind, indices: torch.Tensor) -> Kernel:
        return DecodeKernel(kind, kv_cache, workspace, indices)

    return HybridAttention(
        kv_cache,
        prefill=FlashInferAttention(kv_cache, make_prefill, capturable=False),
        decode=FlashInferAttention(kv_cache, make_decode, capturable=True),
    )


def fastest_version(batch: Batch) -> str:
    """Name the FlashAttention that prefills faster on Hopper GPUs.

    Version 3 uses their asynchronous matrix units, but takes tiles of 128 queries of one head, which short rows do not
    fill; version 2 puts all heads that share a KV head into a tile.
    """
    return "fa3" if batch.num_tokens >= _FA3_TILE * batch.num_rows else "fa2"


class FlashInferAttention(PagedAttention):
    """Attend for the rows of one phase with FlashInfer.

    `plan` covers the kinds of layers that have attended before. A new kind is planned at its first call, which must not
    happen during a graph's capture.
    """

    def __init__(
        self, kv_cache: KVCache, make_kernel: Callable[[LayerKind, torch.Tensor], Kernel], capturable: bool
    ) -> None:
        super().__init__(kv_cache)
        self.capturable = capturable
        self._make_kernel = make_kernel
        self._kernels: dict[LayerKind, Kernel] = {}
        # Page ids of a step, int32[slots, pages]: a row lists at most as many pages as a row of the page table has. By
        # whether layers with a window read them, which may have a page table of their own.
        self._indices: dict[bool, torch.Tensor] = {}
        self._lists: dict[bool, PageLists] = {}
        self._batch: Batch

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        self.inputs, self._batch = inputs, batch
        if batch.num_rows == 0:
            return
        self._lists[False] = self._list_pages(inputs.page_table, windowed=False)
        if inputs.window_table is not None:
            self._lists[True] = self._list_pages(inputs.window_table, windowed=True)
        for kind, kernel in self._kernels.items():
            kernel.plan(batch, self._lists[self._has_own_table(kind)])

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        kind = LayerKind.of(spec)
        if kind not in self._kernels:
            self._kernels[kind] = self._plan_first(kind)
        return self._kernels[kind].run(q, self.kv_cache.layer(spec.layer_id), spec.scale)

    def _has_own_table(self, kind: LayerKind) -> bool:
        return kind.window_left >= 0 and self.inputs.window_table is not None

    def _list_pages(self, page_table: torch.Tensor, windowed: bool) -> PageLists:
        if windowed not in self._indices:
            self._indices[windowed] = torch.empty_like(page_table)
        return page_lists(self._batch, page_table, self.kv_cache.page_size, self._indices[windowed].view(-1))

    def _plan_first(self, kind: LayerKind) -> Kernel:
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("FlashInfer plans on the host: run the step once before it is captured in a CUDA graph")
        windowed = self._has_own_table(kind)
        assert windowed in self._indices, "attend comes after plan"
        kernel = self._make_kernel(kind, self._indices[windowed])
        kernel.plan(self._batch, self._lists[windowed])
        return kernel


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages that each of R rows reads: for row r, ``indices[indptr[r] : indptr[r + 1]]``."""

    indptr: torch.Tensor  # int32[R + 1] on the host
    last_page_len: torch.Tensor  # int32[R] on the host: positions of its last page that each row reads
    indices: torch.Tensor  # int32[N] page ids on the device


def page_lists(batch: Batch, page_table: torch.Tensor, page_size: int, out: torch.Tensor) -> PageLists:
    """List the pages of each row of ``batch``, gathered on the device without waiting for it.

    ``indices`` are the beginning of ``out``, int32 on the device and as large as the contiguous page table.
    """
    num_pages = -(-batch.seq_lens // page_size)
    indptr = np.zeros(batch.num_rows + 1, dtype=np.int32)
    np.cumsum(num_pages, out=indptr[1:])
    # Entry n of row r is entry n + shift[r] of the flattened page table.
    shift = batch.slots * np.int32(page_table.shape[1]) - indptr[:-1]
    staged = to_device({"shift": shift, "num_pages": num_pages}, page_table.device)
    total = int(indptr[-1])
    entries = staged["shift"].repeat_interleave(staged["num_pages"], output_size=total)
    entries += torch.arange(total, dtype=torch.int32, device=page_table.device)
    indices = torch.index_select(page_table.view(-1), 0, entries, out=out[:total])
    last_page_len = batch.seq_lens - (num_pages - 1) * np.int32(page_size)
    device = page_table.device
    return PageLists(pinned_tensor(indptr, device), pinned_tensor(last_page_len, device), indices)


def pinned_tensor(values: Int32Array, device: torch.device) -> torch.Tensor:
    """Make a host tensor from which a CUDA ``device`` can copy while the host goes on."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor


@dataclass(frozen=True, slots=True)
class LayerKind:
    """The part of an `AttentionSpec` that a plan depends on."""

    num_heads: int
    window_left: int  # positions that a token sees to the left of its own; −1: all

    @classmethod
    def of(cls, spec: AttentionSpec) -> LayerKind:
        if spec.scale < _MIN_SCALE:
            raise ConfigError(
                "prefill_attention, decode_attention: FlashInfer needs layers with a scale of at least "
                f"{_MIN_SCALE}, the model has {spec.scale}; choose 'triton' or 'torch'"
            )
        return cls(spec.num_heads, -1 if spec.sliding_window is None else spec.sliding_window - 1)

    def plan_arguments(self, kv_cache: KVCache) -> tuple[tuple[int, ...], dict[str, Any]]:
        """What all plan functions take: sizes by position, options by name. `Kernel.run` gets the scale."""
        _, _, page_size, num_kv_heads, head_dim = kv_cache.k.shape
        dtype = kv_cache.k.dtype
        options = {"window_left": self.window_left, "q_data_type": dtype, "kv_data_type": dtype, "sm_scale": 1.0}
        return (self.num_heads, num_kv_heads, head_dim, page_size), options


class Workspace:
    """Memory for the partial results of FlashInfer's pieces, shared by all kernels, which run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self.programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def for_prefill(self, kind: LayerKind, kv_cache: KVCache) -> torch.Tensor:
        # Tiles have up to 128 queries; where there are more tiles than programs, nothing is split.
        num_kv_heads, head_dim = kv_cache.k.shape[3:]
        return self._at_least(self.programs * 128 * kind.num_heads // num_kv_heads, head_dim)

    def for_decode(self, kind: LayerKind, kv_cache: KVCache, rows: int) -> torch.Tensor:
        # Tiles have 16 queries or more, as the query heads of one KV head share a tile.
        num_kv_heads, head_dim = kv_cache.k.shape[3:]
        group = kind.num_heads // num_kv_heads
        tile = next(size for size in (16, 64, 128) if group <= size or size == 128)
        pieces = max(self.programs // num_kv_heads, rows * group // tile + rows)
        return self._at_least(max(self.programs * 128 * group, pieces * tile * kind.num_heads), head_dim)

    def _at_least(self, queries: int, head_dim: int) -> torch.Tensor:
        # A float32 output and log-sum-exp for each query. Kernels that got a smaller buffer before keep it.
        needed = 4 * queries * (head_dim + 1) + 4096
        if len(self._buffer) < needed:
            self._buffer = self._buffer.new_zeros(needed)
        return self._buffer


class Kernel(Protocol):
    """Attends for the rows of one phase, in layers of one kind."""

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """Prepare for one step."""
        ...

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """Attend with ``q``, [T, num_heads, head_dim], over one layer of the cache; ``scale`` is the factor on q·k."""
        ...


class PrefillKernel:
    """FlashAttention for rows of any number of tokens behind any prefix."""

    def __init__(
        self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, choose_version: Callable[[Batch], str]
    ) -> None:
        self._memory = workspace.for_prefill(kind, kv_cache)
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        self._choose_version = choose_version
        self._by_version: dict[str, tuple[Any, PlanCaller]] = {}
        self._wrapper: Any

    def plan(self, batch: Batch, lists: PageLists) -> None:
        version = self._choose_version(batch)
        if version not in self._by_version:
            from flashinfer import BatchPrefillWithPagedKVCacheWrapper

            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._memory, "NHD", backend=version)
            self._by_version[version] = wrapper, PlanCaller()
        self._wrapper, call = self._by_version[version]
        indptr = pinned_tensor(batch.cu_seqlens_q, lists.indices.device)
        pages = (lists.indptr, lists.indices, lists.last_page_len)
        longest = batch.max_q_len
        sizes, options = self._sizes, self._options
        call(self._wrapper.plan, indptr, *pages, *sizes, causal=True, max_token_per_sequence=longest, **options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, kv, q_scale=scale, out=out)
        return out


class DecodeKernel:
    """One query token a row, on tensor cores: the queries of all heads that share a KV head are a tile.

    Each number of rows has a wrapper whose buffers keep their addresses, so CUDA graphs over them stay valid.
    """

    def __init__(self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, indices: torch.Tensor) -> None:
        # CUDA graphs add padded rows, of one page.
        self._memory = workspace.for_decode(kind, kv_cache, max(len(indices), 256))
        self._indices = indices.view(-1)
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        self._by_rows: dict[int, DecodeWrapper] = {}
        self._current: DecodeWrapper

    def plan(self, batch: Batch, lists: PageLists) -> None:
        rows = batch.num_rows
        if rows not in self._by_rows:
            self._by_rows[rows] = DecodeWrapper(rows, self._memory, self._indices)
        self._current = self._by_rows[rows]
        self._current.plan(lists, self._sizes, self._options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        out: torch.Tensor = self._current.wrapper.run(q, kv, q_scale=scale)
        return out


class DecodeWrapper:
    """FlashInfer's decode wrapper for steps of a fixed number of rows, and its buffers."""

    def __init__(self, rows: int, memory: torch.Tensor, indices: torch.Tensor) -> None:
        from flashinfer import BatchDecodeWithPagedKVCacheWrapper, fast_decode_plan

        self._indptr = torch.zeros(rows + 1, dtype=torch.int32, device=indices.device)
        self._last_page_len = torch.ones(rows, dtype=torch.int32, device=indices.device)
        self.wrapper = BatchDecodeWithPagedKVCacheWrapper(
            memory,
            "NHD",
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=self._indptr,
            paged_kv_indices_buffer=indices,
            paged_kv_last_page_len_buffer=self._last_page_len,
        )
        # The list of pieces is short. A wrapper's own 8 MB would add up over many numbers of rows.
        self.wrapper.reset_workspace_buffer(memory, memory.new_empty(2**17 + 128 * rows))
        self._call = PlanCaller()
        self._fast_plan = fast_decode_plan
        self._planned = False

    def plan(self, lists: PageLists, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        """Plan a step. The first plan chooses the kernel and fills the buffers; later ones are faster and do not."""
        pages = (lists.indptr, lists.indices, lists.last_page_len)
        if self._planned:
            self._indptr.copy_(lists.indptr, non_blocking=True)
            self._last_page_len.copy_(lists.last_page_len, non_blocking=True)
            self._call(self._fast_plan, self.wrapper, *pages, *sizes, **options)
        else:
            self._call(self.wrapper.plan, *pages, *sizes, **options)
            self._planned = True


class PlanCaller:
    """Calls plan functions of one wrapper; each waits for the copy from pinned memory that the one before started."""

    def __init__(self) -> None:
        self._copied = torch.cuda.Event()

    def __call__(self, plan: Callable[..., None], *args: Any, **options: Any) -> None:
        self._copied.synchronize()
        plan(*args, **options)
        self._copied.record()
