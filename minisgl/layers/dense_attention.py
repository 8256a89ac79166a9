"""Attention without a KV cache: enough to run a whole prompt once, before chapter 4 brings the cache."""

from __future__ import annotations

import torch

from minisgl.core import AttentionSpec, Batch, DeviceBatch
from minisgl.layers.sdpa import causal_mask, grouped_query_attention


class DenseAttention:
    """An `AttentionBackend` in which every row attends to this step's own tokens and to nothing before.

    Right for whole prompts only; a step that continues a sequence would have to remember its keys and values.
    """

    capturable = False

    def __init__(self) -> None:
        self._bounds: list[int] = []

    def plan(self, batch: Batch, inputs: DeviceBatch) -> None:
        """Note where each row begins and ends."""
        self._bounds = batch.cu_seqlens_q.tolist()

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        """Attend row by row; see `AttentionBackend.forward`."""
        out = torch.empty_like(q)
        for start, stop in zip(self._bounds, self._bounds[1:], strict=False):
            row = slice(start, stop)
            positions = torch.arange(stop - start, device=q.device)[None]
            mask = causal_mask(positions, positions, spec.sliding_window, q.dtype)
            out[row] = grouped_query_attention(q[None, row], k[None, row], v[None, row], mask, spec.scale)[0]
        return out
