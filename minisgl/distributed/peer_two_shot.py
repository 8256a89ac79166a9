"""The all-reduce of more bytes: each rank adds up a share of the rows for all, then hands its sums out.

A reduce-scatter and an all-gather. Of its data a rank sends every peer the peer's share, and of its sums all to every
peer: nearly twice its data, however many ranks there are. It takes two trips, and each ends with signals beside the
data, which costs less than numbers between the data where there is much of it.

One inbox and one outbox are enough. A peer that writes its next data has heard that this rank's sums are complete, so
the inbox is read; and one that writes its next sums has this rank's next data, so the outbox is read.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.distributed.peer_signals import begin_call, may_speak, memory_of, signal, wait
from minisgl.kernels.launch import tile_range


@triton.jit
def two_shot_kernel(
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    total_ptr,
    peers_ptr,
    state_ptr,
    lost_ptr,
    count,
    EPS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    NORM: tl.constexpr,
    INBOX: tl.constexpr,
    OUTBOX: tl.constexpr,
    PADS: tl.constexpr,
    GROUPS: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """Rows in groups of one for each rank: rank r adds up row r of every group, and normalises it if NORM.

    Without NORM, ``out = sum of the x of all ranks``. With it, ``total = that sum + residual`` and ``out =
    RMSNorm(total)``; then only the rows of ``total`` that this rank has added up are written, and only those of the
    residual are read.

    x, residual, out, total: ``count`` elements, contiguous, rows of SIZE of them; the last row may be shorter if it is
    not normalised. weight: [SIZE]. GROUPS is how many groups inbox, outbox and pads have room for.
    """
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    columns = tl.arange(0, BLOCK)
    if NORM:
        weight = tl.load(weight_ptr + columns, mask=columns < SIZE, other=0.0).to(tl.float32)
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    speaks = may_speak(state_ptr)
    call = begin_call(state_ptr)
    inbox = memory_of(peers_ptr, RANK, INBOX, dtype)
    outbox = memory_of(peers_ptr, RANK, OUTBOX, dtype)
    for group in tile_range(tl.program_id(0), tl.cdiv(count, SIZE * RANKS), tl.num_programs(0)):
        first = group * (RANKS * SIZE) + columns
        for step in tl.static_range(1, RANKS):
            theirs = first + (RANK + step) % RANKS * SIZE
            x = tl.load(x_ptr + theirs, (columns < SIZE) & (theirs < count), other=0.0)
            to = memory_of(peers_ptr, (RANK + step) % RANKS, INBOX, dtype) + first + RANK * SIZE
            tl.store(to, x, (columns < SIZE) & (theirs < count))
        mine = first + RANK * SIZE
        exists = (columns < SIZE) & (mine < count)
        x = tl.load(x_ptr + mine, exists, other=0.0).to(tl.float32)
        if ADD:
            residual = tl.load(residual_ptr + mine, exists, other=0.0).to(tl.float32)
        signal(peers_ptr, group, call, speaks, PADS, RANK, RANKS)
        came = wait(peers_ptr, state_ptr, lost_ptr, group, call, PADS, RANK, RANKS)

        total = tl.zeros_like(x)
        for peer in tl.static_range(RANKS):  # in the order of the ranks, as in one shot: the same bits
            if peer == RANK:
                total += x
            else:
                total += tl.load(inbox + first + peer * SIZE, exists, other=0.0).to(tl.float32)
        result = total.to(dtype)
        if ADD:
            result = (result.to(tl.float32) + residual).to(dtype)
        if NORM:
            tl.store(total_ptr + mine, result, exists)
            value = result.to(tl.float32)
            result = (value * tl.rsqrt(tl.sum(value * value, axis=0) / SIZE + EPS) * weight).to(dtype)
        tl.store(out_ptr + mine, result, exists)
        for step in tl.static_range(1, RANKS):
            to = memory_of(peers_ptr, (RANK + step) % RANKS, OUTBOX, dtype) + mine
            tl.store(to, result, exists)
        signal(peers_ptr, GROUPS + group, call, speaks & came, PADS, RANK, RANKS)
        wait(peers_ptr, state_ptr, lost_ptr, GROUPS + group, call, PADS, RANK, RANKS)

        for step in tl.static_range(1, RANKS):
            theirs = first + (RANK + step) % RANKS * SIZE
            there = (columns < SIZE) & (theirs < count)
            tl.store(out_ptr + theirs, tl.load(outbox + theirs, there, other=0.0), there)
