"""Steps as an engine would send them, and attention that is too simple to be wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from minisgl.batch import Batch, DeviceBatch, build_batch
from minisgl.context import AttentionSpec

CPU = torch.device("cpu")


def device_batch(
    batch: Batch,
    input_ids: np.ndarray[Any, Any],
    page_table: np.ndarray[Any, Any],
    device: torch.device = CPU,
) -> DeviceBatch:
    """The tensors of ``batch``, with logits of all T tokens."""
    return DeviceBatch(
        input_ids=torch.from_numpy(input_ids.astype(np.int32)).to(device),
        positions=torch.from_numpy(batch.positions).to(device),
        out_locs=torch.from_numpy(batch.out_locs).to(device),
        slots=torch.from_numpy(batch.slots).to(device),
        seq_lens=torch.from_numpy(batch.seq_lens).to(device),
        cu_seqlens_q=torch.from_numpy(batch.cu_seqlens_q).to(device),
        page_table=torch.from_numpy(page_table).to(device),
        logit_rows=torch.arange(batch.num_tokens, dtype=torch.int32, device=device),
    )


def step_of(q_lens: Sequence[int], kv_lens: Sequence[int], page_size: int = 16) -> tuple[Batch, DeviceBatch]:
    """A step over rows of these lengths, on pages in random order. Rows that feed one token behind a prefix decode;
    they must come first."""
    rows, width = len(q_lens), -(-max(q + kv for q, kv in zip(q_lens, kv_lens, strict=True)) // page_size)
    decodes = [q == 1 and kv > 0 for q, kv in zip(q_lens, kv_lens, strict=True)]
    page_table = np.random.default_rng(2).permutation(rows * width).reshape(rows, width).astype(np.int32)
    batch = build_batch(
        np.arange(rows, dtype=np.int32),
        np.array(q_lens, dtype=np.int32),
        np.array(kv_lens, dtype=np.int32),
        page_table,
        page_size,
        sample_rows=np.zeros(0, dtype=np.int32),
        output_index=np.zeros(0, dtype=np.int32),
        num_decode=decodes.index(False) if False in decodes else rows,
    )
    return batch, device_batch(batch, np.zeros(batch.num_tokens, dtype=np.int32), page_table)


def naive_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, cached: int = 0
) -> torch.Tensor:
    """Attention of the last tokens of one sequence, one by one, in float64.

    Args:
        q: [T, heads, head_dim] of the tokens after the first ``cached``.
        k, v: [cached + T, KV heads, head_dim].
    """
    out = torch.empty_like(q)
    group = spec.num_heads // spec.num_kv_heads
    for token in range(len(q)):
        stop = cached + token + 1
        first = 0 if spec.sliding_window is None else max(0, stop - spec.sliding_window)
        keys = k[first:stop].repeat_interleave(group, dim=1).double()
        values = v[first:stop].repeat_interleave(group, dim=1).double()
        scores = torch.einsum("hd,lhd->hl", q[token].double(), keys) * spec.scale
        if spec.soft_cap is not None:
            scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
        total = scores.logsumexp(-1, keepdim=True)
        if spec.sinks is not None:
            total = torch.logaddexp(total, spec.sinks.to(total)[:, None])
        out[token] = torch.einsum("hl,lhd->hd", (scores - total).exp(), values).to(q.dtype)
    return out
