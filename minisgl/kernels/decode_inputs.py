"""Two kernels around the model in a decode step: derive its inputs from the device's tables, and append its tokens.

The twins, ``derive`` and ``append`` of `minisgl.engine.cuda_graph.DecodeBuffers`, take a dozen launches each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import pdl_launch_args


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
    """Apply changes to the page table, then write positions, cache locations and token ids of a decode step.

    Args:
        slots, seq_lens: int32[B] of the step's rows.
        tokens: int32[slots, max_seq_len] token table.
        page_table: int32[slots, pages], changed; another of this size may follow in memory.
        page_index, page_value: int32[B or more] entries of the flattened page tables, and their new values.
        positions, out_locs, input_ids: int32[B], written; as in `minisgl.batch.DeviceBatch`.
    """
    num_rows = len(slots)
    _derive_inputs_kernel[(1,)](
        page_index,
        page_value,
        slots,
        seq_lens,
        tokens,
        page_table,
        positions,
        out_locs,
        input_ids,
        num_rows,
        len(page_index),
        tokens.stride(0),
        page_table.stride(0),
        PAGE_SIZE=page_size,
        BLOCK=triton.next_power_of_2(num_rows),
        CHANGES=triton.next_power_of_2(len(page_index)),
        num_warps=4,
    )


@triton.jit
def _derive_inputs_kernel(
    page_index_ptr: tl.tensor,
    page_value_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    tokens_ptr: tl.tensor,  # int32[slots, token_width]
    page_table_ptr: tl.tensor,  # int32[slots, table_width]
    positions_ptr: tl.tensor,
    out_locs_ptr: tl.tensor,
    input_ids_ptr: tl.tensor,
    num_rows: tl.tensor,
    num_changes: tl.tensor,
    token_width: tl.tensor,
    table_width: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANGES: tl.constexpr,
) -> None:
    """One program, a row a thread: apply the page-table changes, then look up each row's token and its location."""
    row = tl.arange(0, BLOCK)
    mask = row < num_rows
    change = tl.arange(0, CHANGES)
    exists = change < num_changes
    changed = tl.load(page_index_ptr + change, mask=exists, other=0).to(tl.int64)
    tl.store(page_table_ptr + changed, tl.load(page_value_ptr + change, mask=exists, other=0), mask=exists)
    tl.debug_barrier()  # a row may need an entry that another thread has just written
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64)
    position = tl.load(seq_lens_ptr + row, mask=mask, other=1) - 1
    page = tl.load(page_table_ptr + slot * table_width + position // PAGE_SIZE, mask=mask, other=0)
    tl.store(positions_ptr + row, position, mask=mask)
    tl.store(out_locs_ptr + row, page * PAGE_SIZE + position % PAGE_SIZE, mask=mask)
    tl.store(input_ids_ptr + row, tl.load(tokens_ptr + slot * token_width + position, mask=mask, other=0), mask=mask)


def append_tokens(slots: torch.Tensor, seq_lens: torch.Tensor, tokens: torch.Tensor, sampled: torch.Tensor) -> None:
    """Write ``sampled``, int32[B], behind the sequences in the token table ``tokens``, int32[slots, max_seq_len]."""
    num_rows = len(sampled)
    _append_tokens_kernel[(1,)](
        slots,
        seq_lens,
        sampled,
        tokens,
        num_rows,
        tokens.stride(0),
        BLOCK=triton.next_power_of_2(num_rows),
        num_warps=4,
        **pdl_launch_args(sampled),
    )


@triton.jit
def _append_tokens_kernel(
    slots_ptr: tl.tensor,
    seq_lens_ptr: tl.tensor,
    sampled_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_rows: tl.tensor,
    token_width: tl.tensor,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
) -> None:
    """One program, a row a thread: ``tokens[slot, length] = sampled``."""
    row = tl.arange(0, BLOCK)
    mask = row < num_rows
    slot = tl.load(slots_ptr + row, mask=mask, other=0).to(tl.int64)
    length = tl.load(seq_lens_ptr + row, mask=mask, other=0)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
    sampled = tl.load(sampled_ptr + row, mask=mask, other=0)
    tl.store(tokens_ptr + slot * token_width + length, sampled, mask=mask)
