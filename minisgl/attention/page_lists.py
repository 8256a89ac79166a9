"""The page table of a step as FlashInfer wants it: the pages of its rows, end to end (the CSR format)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from minisgl.core import Batch
from minisgl.core.request import Int32Array
from minisgl.engine.staging import to_device


@dataclass(frozen=True, slots=True)
class PageLists:
    """The pages that each of R rows reads.

    Args:
        indptr: int32[R + 1] on the host; row r reads the pages ``indices[indptr[r] : indptr[r + 1]]``.
        last_page_len: int32[R] on the host, how many positions of its last page each row reads.
        indices: int32[N] page ids on the device.
    """

    indptr: torch.Tensor
    last_page_len: torch.Tensor
    indices: torch.Tensor


def page_lists(batch: Batch, page_table: torch.Tensor, page_size: int, memory: torch.Tensor) -> PageLists:
    """List the pages of ``batch``.

    The host knows how many pages each row has, so the page ids are gathered on the device without waiting for it.

    Args:
        batch: the step.
        page_table: int32[slots, pages] on the device, contiguous.
        page_size: tokens a page.
        memory: int32 on the device, as large as the page table: ``indices`` is its beginning.
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
    indices = torch.index_select(page_table.view(-1), 0, entries, out=memory[:total])
    last_page_len = batch.seq_lens - (num_pages - 1) * np.int32(page_size)
    device = page_table.device
    return PageLists(host_tensor(indptr, device), host_tensor(last_page_len, device), indices)


def host_tensor(values: Int32Array, device: torch.device) -> torch.Tensor:
    """A tensor on the host that ``device`` can copy from while the host goes on."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory() if device.type == "cuda" else tensor
