"""Two backends over one KV cache: one for prefill rows, bound by arithmetic, one for decode rows, bound by memory."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import numpy as np
import torch

from minisgl.attention.torch_backend import PagedAttention
from minisgl.batch import Batch, DeviceBatch
from minisgl.context import AttentionSpec
from minisgl.kvcache.pool import KVCache


class HybridAttention(PagedAttention):
    """Hand decode rows to one backend and prefill rows to another, after storing all of a step's keys and values."""

    def __init__(self, kv_cache: KVCache, prefill: PagedAttention, decode: PagedAttention) -> None:
        super().__init__(kv_cache)
        self.prefill = prefill
        self.decode = decode
        self.capturable = decode.capturable
        self.features = prefill.features & decode.features
        self._num_decode: int

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        # Decode plans every step, even without rows, because it may follow the page table to find shared prefixes. Its
        # answer names the work, since only decode steps are captured. Those are handed on unchanged: a captured step
        # reads the very tensors of ``inputs``.
        self.inputs = inputs
        self._num_decode = batch.num_decode
        if batch.num_decode == batch.num_rows:
            return self.decode.plan(batch, inputs)
        decode_rows, prefill_rows = split_phases(batch, inputs)
        self.prefill.plan(*prefill_rows)
        return self.decode.plan(*decode_rows)

    def attend(self, q: torch.Tensor, spec: AttentionSpec) -> torch.Tensor:
        count = self._num_decode  # rows, and their tokens: a decode row is one token
        if count == len(q):
            return self.decode.attend(q, spec)
        if count == 0:
            return self.prefill.attend(q, spec)
        return torch.cat([self.decode.attend(q[:count], spec), self.prefill.attend(q[count:], spec)])


def split_phases(batch: Batch, inputs: DeviceBatch) -> tuple[tuple[Batch, DeviceBatch], tuple[Batch, DeviceBatch]]:
    """The decode rows of a step, and its prefill rows, as two steps."""
    count = batch.num_decode
    return _rows(batch, inputs, slice(0, count)), _rows(batch, inputs, slice(count, batch.num_rows))


def _rows(batch: Batch, inputs: DeviceBatch, rows: slice) -> tuple[Batch, DeviceBatch]:
    """Some consecutive rows as a step that samples nothing and admits nothing."""
    borders = slice(rows.start, rows.stop + 1)
    first, stop = batch.cu_seqlens_q[[rows.start, rows.stop]].tolist()
    tokens = slice(first, stop)
    part = Batch(
        slots=batch.slots[rows],
        cu_seqlens_q=batch.cu_seqlens_q[borders] - np.int32(first),
        seq_lens=batch.seq_lens[rows],
        positions=batch.positions[tokens],
        token_slots=batch.token_slots[tokens],
        out_locs=batch.out_locs[tokens],
        sample_rows=batch.sample_rows[:0],
        output_index=batch.output_index[:0],
        num_decode=batch.num_decode - rows.start,
        page_index=batch.page_index,
        page_value=batch.page_value,
    )
    part_inputs = replace(
        inputs,
        input_ids=inputs.input_ids[tokens],
        positions=inputs.positions[tokens],
        out_locs=inputs.out_locs[tokens],
        window_locs=None if inputs.window_locs is None else inputs.window_locs[tokens],
        slots=inputs.slots[rows],
        seq_lens=inputs.seq_lens[rows],
        cu_seqlens_q=inputs.cu_seqlens_q[borders] - first,
        logit_rows=inputs.logit_rows[:0],
    )
    return part, part_inputs
