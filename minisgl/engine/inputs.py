"""From the scheduler's `Batch` to the model's `DeviceBatch`."""

from __future__ import annotations

import torch

from minisgl.core.batch import Batch, DeviceBatch
from minisgl.core.request import Int32Array


def batch_arrays(batch: Batch) -> dict[str, Int32Array]:
    """What the device needs of a batch, by name, for `to_device`."""
    return {
        "slots": batch.slots,
        "cu_seqlens_q": batch.cu_seqlens_q,
        "seq_lens": batch.seq_lens,
        "positions": batch.positions,
        "token_slots": batch.token_slots,
        "out_locs": batch.out_locs,
        "sample_slots": batch.slots[batch.sample_rows],
        "sample_positions": batch.seq_lens[batch.sample_rows],
        "logit_rows": batch.cu_seqlens_q[1:][batch.sample_rows] - 1,
    }


def device_batch(staged: dict[str, torch.Tensor], input_ids: torch.Tensor, page_table: torch.Tensor) -> DeviceBatch:
    """Name the staged tensors as the model knows them.

    Args:
        staged: `batch_arrays` on the device.
        input_ids: [T] int32 tokens to feed.
        page_table: [rows, pages] int32.
    """
    return DeviceBatch(
        input_ids=input_ids,
        positions=staged["positions"],
        out_locs=staged["out_locs"],
        slots=staged["slots"],
        seq_lens=staged["seq_lens"],
        cu_seqlens_q=staged["cu_seqlens_q"],
        page_table=page_table,
        logit_rows=staged["logit_rows"],
    )
