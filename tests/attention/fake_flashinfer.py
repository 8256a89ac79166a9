"""What we use of FlashInfer, computed token by token on any device, to test our planning where there is no GPU.

As in the original, a wrapper that was made for CUDA graphs reads the buffers that it was given, `fast_decode_plan` does
not fill them, and a plan goes through pinned memory that the plan before may still be copied from.
"""

from __future__ import annotations

from typing import Any

import torch

from minisgl.context import AttentionSpec
from tests.steps import naive_attention


class FakeEvent:
    """Stands for `torch.cuda.Event`: what was recorded is finished only after a wait for it."""

    finished = True

    def record(self) -> None:
        FakeEvent.finished = False

    def synchronize(self) -> None:
        FakeEvent.finished = True


class _Wrapper:
    def __init__(self, workspace: torch.Tensor, layout: str) -> None:
        assert workspace.dtype == torch.uint8
        assert layout == "NHD"

    def _plan(self, sizes: tuple[int, ...], window_left: int, sm_scale: float) -> None:
        assert FakeEvent.finished, "the copy from the pinned memory of the plan before may still run"
        self.sizes, self.window_left, self.sm_scale = sizes, window_left, sm_scale

    def _run(
        self,
        q: torch.Tensor,
        kv: tuple[torch.Tensor, torch.Tensor],
        scale: float,
        qo_indptr: torch.Tensor,
        pages: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    ) -> torch.Tensor:
        num_heads, num_kv_heads, head_dim, page_size = self.sizes
        assert kv[0].shape[1:] == (page_size, num_kv_heads, head_dim)
        window = None if self.window_left == -1 else self.window_left + 1
        spec = AttentionSpec(0, num_heads, num_kv_heads, head_dim, self.sm_scale * scale, window)
        indptr, indices, last_page_len = pages
        assert len(q) == qo_indptr[-1]
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        for row in range(len(last_page_len)):
            own = indices[indptr[row] : indptr[row + 1]].long()
            length = (len(own) - 1) * page_size + int(last_page_len[row])
            k, v = (x[own].flatten(0, 1)[:length] for x in kv)
            tokens = slice(int(qo_indptr[row]), int(qo_indptr[row + 1]))
            out[tokens] = naive_attention(q[tokens], k, v, spec, length - (tokens.stop - tokens.start))
        return out


class BatchPrefillWithPagedKVCacheWrapper(_Wrapper):
    def __init__(self, workspace: torch.Tensor, layout: str, backend: str) -> None:
        super().__init__(workspace, layout)
        assert backend in ("fa2", "fa3")
        self.steps: list[list[int]] = []
        """Tokens of the rows of each step."""

    def plan(
        self,
        qo_indptr: torch.Tensor,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        causal: bool,
        max_token_per_sequence: int,
        window_left: int,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        sm_scale: float,
    ) -> None:
        assert causal
        assert max_token_per_sequence == int(qo_indptr.diff().max())
        self._plan(sizes, window_left, sm_scale)
        self._qo_indptr = qo_indptr
        self.steps.append(qo_indptr.diff().tolist())
        self._pages = indptr, indices, last_page_len

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], q_scale: float, out: torch.Tensor) -> None:
        out.copy_(self._run(q, kv, q_scale, self._qo_indptr, self._pages))


class BatchDecodeWithPagedKVCacheWrapper(_Wrapper):
    def __init__(
        self,
        workspace: torch.Tensor,
        layout: str,
        use_cuda_graph: bool,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor,
        paged_kv_indices_buffer: torch.Tensor,
        paged_kv_last_page_len_buffer: torch.Tensor,
    ) -> None:
        super().__init__(workspace, layout)
        assert use_cuda_graph
        self._pages = paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer
        self.planned = False

    def reset_workspace_buffer(self, workspace: torch.Tensor, list_of_pieces: torch.Tensor) -> None:
        assert list_of_pieces.dtype == torch.uint8

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        **options: Any,
    ) -> None:
        for buffer, values in zip(self._pages, (indptr, indices, last_page_len), strict=True):
            buffer[: len(values)] = values
        self.planned = True
        fast_decode_plan(self, indptr, indices, last_page_len, *sizes, **options)

    def run(self, q: torch.Tensor, kv: tuple[torch.Tensor, torch.Tensor], q_scale: float) -> torch.Tensor:
        qo_indptr = torch.arange(len(self._pages[2]) + 1)
        return self._run(q, kv, q_scale, qo_indptr, self._pages)


def fast_decode_plan(
    wrapper: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    *sizes: int,
    window_left: int,
    q_data_type: torch.dtype,
    kv_data_type: torch.dtype,
    sm_scale: float,
) -> None:
    assert wrapper.planned, "the first plan chooses the kernel"
    assert len(last_page_len) == len(wrapper._pages[2])
    assert len(indices) <= len(wrapper._pages[1])
    assert not indptr.is_cuda
    assert not last_page_len.is_cuda
    wrapper._plan(sizes, window_left, sm_scale)
