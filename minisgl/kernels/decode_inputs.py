"""Around the model in a decode step: what it reads, from the device's own tables, and where its tokens go.

The twins are the methods of `DecodeBuffers` in `minisgl.graphs`. In PyTorch each is a dozen kernels of a few
microseconds that move a kilobyte; here it is one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args


@triton.jit
def _derive_kernel(
    index_ptr: tl.tensor,
    page_ptr: tl.tensor,
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    page_table_ptr: tl.tensor,
    position_ptr: tl.tensor,
    loc_ptr: tl.tensor,
    id_ptr: tl.tensor,
    rows: tl.tensor,
    token_width: tl.tensor,
    table_width: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program, a row a thread: apply the page-table changes, then look up each row's token and its location.

    index, page, slot, length, position, loc, id: int32[rows]. tokens, page_table: int32 tables of the given widths.
    """
    row = tl.arange(0, BLOCK)
    exists = row < rows
    changed = tl.load(index_ptr + row, mask=exists, other=0).to(tl.int64)
    tl.store(page_table_ptr + changed, tl.load(page_ptr + row, mask=exists, other=0), mask=exists)
    tl.debug_barrier()  # a row may need an entry that another thread has just written
    slot = tl.load(slot_ptr + row, mask=exists, other=0).to(tl.int64)
    position = tl.load(length_ptr + row, mask=exists, other=1) - 1
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE_SIZE, mask=exists, other=0)
    tl.store(position_ptr + row, position, mask=exists)
    tl.store(loc_ptr + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=exists)
    tl.store(id_ptr + row, tl.load(tokens_ptr + slot * token_width + position, mask=exists, other=0), mask=exists)


def derive_inputs(
    *,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    tokens: torch.Tensor,
    page_table: torch.Tensor,
    page_index: torch.Tensor,
    page_value: torch.Tensor,
    page_size: int,
    positions: torch.Tensor,
    out_locs: torch.Tensor,
    input_ids: torch.Tensor,
) -> None:
    """Apply changes to the page table, and fill in positions, locations and token ids of a decode step.

    Args:
        slots, seq_lens: int32[B] of its rows.
        tokens: int32[slots, max_seq_len] token table.
        page_table: int32[slots, pages], changed.
        page_index, page_value: int32[B] entries of the flattened page table, and what they become.
        page_size: tokens a page.
        positions, out_locs, input_ids: int32[B], written; as in `minisgl.batch.DeviceBatch`.
    """
    rows = len(slots)
    _derive_kernel[(1,)](
        page_index,
        page_value,
        slots,
        seq_lens,
        tokens,
        page_table,
        positions,
        out_locs,
        input_ids,
        rows,
        tokens.stride(0),
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(rows),
        num_warps=4,
    )


@triton.jit
def _append_kernel(
    slot_ptr: tl.tensor,
    length_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    rows: tl.tensor,
    token_width: tl.tensor,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program, a row a thread: ``tokens[slot, length] = sampled``."""
    row = tl.arange(0, BLOCK)
    exists = row < rows
    slot = tl.load(slot_ptr + row, mask=exists, other=0).to(tl.int64)
    length = tl.load(length_ptr + row, mask=exists, other=0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    sampled = tl.load(sampled_ptr + row, mask=exists, other=0)
    tl.store(tokens_ptr + slot * token_width + length, sampled, mask=exists)


def append_tokens(slots: torch.Tensor, seq_lens: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
    """Write sampled tokens, int32[B], behind the sequences of a decode step.

    Args:
        slots, seq_lens: int32[B] of its rows.
        tokens: int32[slots, max_seq_len] token table.
        sampled: int32[B].
    """
    rows = len(sampled)
    _append_kernel[(1,)](
        slots,
        seq_lens,
        sampled,
        tokens,
        rows,
        tokens.stride(0),
        BLOCK=triton.next_power_of_2(rows),
        num_warps=4,
        **pdl_launch_args(sampled),
    )
