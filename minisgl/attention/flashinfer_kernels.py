"""FlashInfer's kernels for paged attention (Ye et al. 2025), planned for one step and run by every layer.

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

from minisgl.attention.page_lists import PageLists, host_tensor
from minisgl.core import AttentionSpec, Batch
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache

_LEAST_SCALE = 2e-3
"""FlashInfer gives invisible positions −50,000 before it scales: that has to be out of sight afterwards, too."""

_FULL_TILE = 128
"""Queries of a row that version 3 attends for in one program."""


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
        if spec.scale < _LEAST_SCALE:
            raise ConfigError(
                "prefill_attention, decode_attention: FlashInfer needs layers with a scale of at least "
                f"{_LEAST_SCALE}, the model has {spec.scale}; choose 'triton' or 'torch'"
            )
        return cls(spec.num_heads, -1 if spec.sliding_window is None else spec.sliding_window - 1)

    def plan_arguments(self, kv_cache: KVCache) -> tuple[tuple[int, ...], dict[str, Any]]:
        """What all plan functions take: sizes by position, options by name. The scale is given to `run`."""
        _, _, page_size, num_kv_heads, head_dim = kv_cache.k.shape
        dtype = kv_cache.k.dtype
        options = {"window_left": self.window_left, "q_data_type": dtype, "kv_data_type": dtype, "sm_scale": 1.0}
        return (self.num_heads, num_kv_heads, head_dim, page_size), options


class Workspace:
    """Memory for partial results. Kernels share it, since they run one after the other on one stream.

    FlashInfer cuts rows into pieces: enough for two programs a multiprocessor, or one for every tile of queries.
    """

    def __init__(self, device: torch.device) -> None:
        self.programs = 2 * torch.cuda.get_device_properties(device).multi_processor_count
        self._buffer = torch.zeros(0, dtype=torch.uint8, device=device)

    def for_prefill(self, kind: LayerKind, kv_cache: KVCache) -> torch.Tensor:
        """Room for tiles of up to 128 queries; where there are more tiles than programs, nothing is split."""
        num_kv_heads, head_dim = kv_cache.k.shape[3:]
        return self._at_least(self.programs * 128 * kind.num_heads // num_kv_heads, head_dim)

    def for_decode(self, kind: LayerKind, kv_cache: KVCache, rows: int) -> torch.Tensor:
        """Room for tiles of 16 queries or more, as the query heads of one KV head share a tile."""
        num_kv_heads, head_dim = kv_cache.k.shape[3:]
        group = kind.num_heads // num_kv_heads
        tile = next(size for size in (16, 64, 128) if group <= size or size == 128)
        pieces = max(self.programs // num_kv_heads, rows * group // tile + rows)
        return self._at_least(max(self.programs * 128 * group, pieces * tile * kind.num_heads), head_dim)

    def _at_least(self, queries: int, head_dim: int) -> torch.Tensor:
        """A float32 output and log-sum-exp for so many queries. Whoever got a smaller buffer before, keeps it."""
        needed = 4 * queries * (head_dim + 1) + 4096
        if len(self._buffer) < needed:
            self._buffer = self._buffer.new_zeros(needed)
        return self._buffer


@dataclass(frozen=True, slots=True)
class Scratch:
    """What every step of a backend uses again.

    Args:
        indices: int32, where the page ids of a step are listed.
        max_rows: most rows of a step.
    """

    indices: torch.Tensor
    max_rows: int

    @classmethod
    def for_table(cls, page_table: torch.Tensor) -> Scratch:
        """For steps over this page table: a row lists at most as many pages as a row of the table has. CUDA graphs
        add padded rows, of one page."""
        return cls(torch.empty_like(page_table).view(-1), max(len(page_table), 256))


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


def fastest_version(batch: Batch) -> str:
    """Which FlashAttention prefills faster on Hopper GPUs.

    Version 3 uses their asynchronous matrix units, but every program attends for one head and a tile of 128 queries of
    one row. Version 2 fills a tile with the queries of all heads that share a KV head, which short rows need.
    """
    return "fa3" if batch.num_tokens >= _FULL_TILE * batch.num_rows else "fa2"


class PrefillKernel:
    """FlashAttention for rows of any number of tokens behind any prefix.

    Args:
        kind: of the layers.
        kv_cache: that they read.
        workspace: for partial results.
        choose_version: ``"fa2"`` or ``"fa3"`` for a step.
    """

    def __init__(
        self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, choose_version: Callable[[Batch], str]
    ) -> None:
        self._memory = workspace.for_prefill(kind, kv_cache)
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        self._choose_version = choose_version
        self._by_version: dict[str, tuple[Any, StagedPlan]] = {}
        self._wrapper: Any

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """See `Kernel.plan`."""
        version = self._choose_version(batch)
        if version not in self._by_version:
            wrapper = BatchPrefillWithPagedKVCacheWrapper(self._memory, "NHD", backend=version)
            self._by_version[version] = wrapper, StagedPlan()
        self._wrapper, staged = self._by_version[version]
        indptr = host_tensor(batch.cu_seqlens_q, lists.indices.device)
        pages = (lists.indptr, lists.indices, lists.last_page_len)
        longest = batch.max_q_len
        sizes, options = self._sizes, self._options
        staged(self._wrapper.plan, indptr, *pages, *sizes, causal=True, max_token_per_sequence=longest, **options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """See `Kernel.run`."""
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        self._wrapper.run(q, kv, q_scale=scale, out=out)
        return out


class DecodeKernel:
    """One query token a row, on tensor cores: the queries of all heads that share a KV head are a tile.

    There is a wrapper for each number of rows, whose buffers keep their addresses: a CUDA graph that was captured over
    them stays valid, as every plan for as many rows refreshes them.

    Args:
        kind: of the layers.
        kv_cache: that they read.
        workspace: for partial results.
        scratch: of the backend.
    """

    def __init__(self, kind: LayerKind, kv_cache: KVCache, workspace: Workspace, scratch: Scratch) -> None:
        self._memory = workspace.for_decode(kind, kv_cache, scratch.max_rows)
        self._indices = scratch.indices
        self._sizes, self._options = kind.plan_arguments(kv_cache)
        self._by_rows: dict[int, FixedRows] = {}
        self._current: FixedRows

    def plan(self, batch: Batch, lists: PageLists) -> None:
        """See `Kernel.plan`."""
        rows = batch.num_rows
        if rows not in self._by_rows:
            self._by_rows[rows] = FixedRows(rows, self._memory, self._indices)
        self._current = self._by_rows[rows]
        self._current.plan(lists, self._sizes, self._options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], scale: float) -> torch.Tensor:
        """See `Kernel.run`."""
        out: torch.Tensor = self._current.wrapper.run(q, kv, q_scale=scale)
        return out


class FixedRows:
    """A decode wrapper and its buffers.

    Args:
        rows: of every step.
        memory: for partial results.
        indices: for page ids.
    """

    def __init__(self, rows: int, memory: torch.Tensor, indices: torch.Tensor) -> None:
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
        self._staged = StagedPlan()
        self._chosen = False

    def plan(self, lists: PageLists, sizes: tuple[int, ...], options: dict[str, Any]) -> None:
        """The first plan chooses the kernel and fills the buffers. Later ones are faster and leave both to us."""
        pages = (lists.indptr, lists.indices, lists.last_page_len)
        if self._chosen:
            self._indptr.copy_(lists.indptr, non_blocking=True)
            self._last_page_len.copy_(lists.last_page_len, non_blocking=True)
            self._staged(fast_decode_plan, self.wrapper, *pages, *sizes, **options)
        else:
            self._staged(self.wrapper.plan, *pages, *sizes, **options)
            self._chosen = True
