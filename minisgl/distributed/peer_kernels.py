"""Triton kernels of the all-reduce over peer memory.

A captured kernel gets the same arguments at every replay, so each rank counts its calls on the device. All ranks make
the same calls in the same order, so the number is the same everywhere; a signal is that number, written into a peer's
memory, and needs no reset.

A rank that gives up waiting has wrong results, so it stops signalling, and all other ranks give up as well.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.kernels.launch import tile_range

CALL, POLLS = tl.constexpr(0), tl.constexpr(1)
"""Words of a rank's state, int64[2]. CALL: the number of calls so far in the upper half, and in the lower half how many
programs of the present one have begun. POLLS: how often a program polls before it gives up; after that, 0."""


@triton.jit
def begin_call(state_ptr):
    """Return the number of this call, an int32 that is the same in all its programs and on all ranks.

    The last program to begin sets the number of the next call, because then no program reads this one any more.
    """
    before = tl.atomic_add(state_ptr + CALL, 1, sem="relaxed")
    call = (before >> 32) + 1
    if (before & 0xFFFFFFFF) == tl.num_programs(0) - 1:
        tl.store(state_ptr + CALL, call << 32)
    return call.to(tl.int32)


@triton.jit
def give_up(state_ptr, lost_ptr):
    """Record that a peer did not answer. The results of this call and of all later ones are undefined."""
    tl.store(state_ptr + POLLS, 0)
    tl.store(lost_ptr, 1)


@triton.jit
def may_speak(state_ptr):
    """Whether no call has given up so far."""
    return tl.load(state_ptr + POLLS) > 0


@triton.jit
def memory_of(peers_ptr, peer, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Pointer into a peer's piece, at OFFSET bytes. ``peers_ptr``: addresses of all pieces, int64[ranks]."""
    return tl.multiple_of((tl.load(peers_ptr + peer) + OFFSET).to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(peers_ptr, pad, call, speaks, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks, if ``speaks``, that this program's writes so far are complete and visible.

    ``pad`` is a row of the signal pads, int32[pads, RANKS] at OFFSET.
    """
    tl.debug_barrier()  # all threads of the program have written before some of them signal
    peers = tl.arange(0, triton.next_power_of_2(RANKS))
    exists = (peers < RANKS) & speaks
    pieces = tl.load(peers_ptr + peers, exists, other=0)
    words = (pieces + OFFSET).to(tl.pointer_type(tl.int32)) + pad * RANKS + RANK
    tl.atomic_xchg(words, tl.zeros_like(peers) + call, exists, sem="release", scope="sys")


@triton.jit
def wait(peers_ptr, state_ptr, lost_ptr, pad, call, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait until all ranks have signalled this call, so that what they wrote before is visible. False: gave up."""
    peers = tl.arange(0, triton.next_power_of_2(RANKS))
    exists = peers < RANKS
    words = memory_of(peers_ptr, RANK, OFFSET, tl.int32) + pad * RANKS + peers
    most_polls = tl.load(state_ptr + POLLS)
    polls = tl.zeros_like(most_polls)
    missing, came = 1, 1
    while missing > 0:
        seen = tl.atomic_add(words, tl.zeros_like(peers), exists, sem="acquire", scope="sys")
        missing = tl.max((exists & (seen != call)).to(tl.int32))
        polls += 1
        if (missing > 0) & (polls > most_polls):
            give_up(state_ptr, lost_ptr)
            missing, came = 0, 0
    tl.debug_barrier()
    return came > 0


@triton.jit
def words_of(ptr):
    """The same memory as words of four bytes."""
    return ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def numbers_in(words, dtype: tl.constexpr):
    """The numbers in words of four bytes, one or two a word, in the order of memory and in float32."""
    if dtype.primitive_bitwidth == 32:
        numbers = words.to(dtype, bitcast=True)
    else:
        lower = words.to(tl.int16).to(dtype, bitcast=True)
        upper = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.interleave(lower, upper)
    return numbers.to(tl.float32)


@triton.jit
def send(words, here, part, peers_ptr, call, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write ``words``, int32[N], into the inboxes of all peers, each with the number of the call.

    ``here``, int32[N], are their places among the CAPACITY words that an inbox has for each sender and each turn, and
    ``part``, bool[N], says which to send.
    """
    signed = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    turn = (call & 1) * RANKS + RANK
    for step in tl.static_range(1, RANKS):  # each rank begins with another peer
        inbox = memory_of(peers_ptr, (RANK + step) % RANKS, 0, tl.int64)
        tl.store(inbox + turn * CAPACITY + here, signed, mask=part)


@triton.jit
def missing_in(arrived, exists, call):
    """1 if a word of this call has not arrived, else 0."""
    return tl.max((exists & ((arrived >> 32).to(tl.int32) != call)).to(tl.int32))


@triton.jit
def receive(inbox, exists, arrived, state_ptr, lost_ptr, call):
    """Wait for the words that a peer sends in this call, int32[N]. ``arrived`` is what the first load saw."""
    most_polls = tl.load(state_ptr + POLLS)
    polls = tl.zeros_like(most_polls)
    missing = missing_in(arrived, exists, call)
    while missing > 0:
        arrived = tl.load(inbox, exists, other=0, volatile=True)
        missing = missing_in(arrived, exists, call)
        polls += 1
        if (missing > 0) & (polls > most_polls):
            give_up(state_ptr, lost_ptr)
            missing = 0
    return arrived.to(tl.int32)


@triton.jit
def sum_of_ranks(
    words, here, exists, peers_ptr, state_ptr, lost_ptr, call,
    dtype: tl.constexpr, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr,
):  # fmt: skip
    """Sum in float32, in the order of the ranks, so that all of them get the same bits; then round."""
    inbox = memory_of(peers_ptr, RANK, 0, tl.int64) + (call & 1) * (RANKS * CAPACITY) + here
    at_first_sight = ()
    for peer in tl.static_range(RANKS):  # all loads are under way before the first is waited for
        seen = tl.load(inbox + peer * CAPACITY, exists & (peer != RANK), other=0, volatile=True)
        at_first_sight += (seen,)  # type: ignore[assignment]
    total = tl.zeros_like(numbers_in(words, dtype))
    for peer in tl.static_range(RANKS):
        if peer != RANK:
            theirs = receive(inbox + peer * CAPACITY, exists, at_first_sight[peer], state_ptr, lost_ptr, call)
        else:
            theirs = words
        total += numbers_in(theirs, dtype)
    return total.to(dtype)


@triton.jit
def one_shot_kernel(
    x_ptr, out_ptr, peers_ptr, state_ptr, lost_ptr, num_words,
    CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, BLOCK: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out = sum of the x of all ranks``, with one program for BLOCK words."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    here = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = here < num_words
    if USE_PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    words = tl.load(words_of(x_ptr) + here, exists, other=0)
    speaks = may_speak(state_ptr)
    call = begin_call(state_ptr)
    send(words, here, exists & speaks, peers_ptr, call, CAPACITY, RANK, RANKS)
    total = sum_of_ranks(words, here, exists, peers_ptr, state_ptr, lost_ptr, call, dtype, CAPACITY, RANK, RANKS)
    PER_WORD: tl.constexpr = 32 // dtype.primitive_bitwidth
    first = tl.program_id(0) * BLOCK * PER_WORD
    elements = first + tl.arange(0, BLOCK * PER_WORD)
    tl.store(out_ptr + elements, total, mask=elements < num_words * PER_WORD)


@triton.jit
def two_shot_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, total_ptr, peers_ptr, state_ptr, lost_ptr, count,
    EPS: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, NORM: tl.constexpr,
    INBOX: tl.constexpr, OUTBOX: tl.constexpr, PADS: tl.constexpr, GROUPS: tl.constexpr,
    RANK: tl.constexpr, RANKS: tl.constexpr, USE_PDL: tl.constexpr,
):  # fmt: skip
    """``out = sum of the x of all ranks``; with NORM, ``total = that sum + residual`` and ``out = RMSNorm(total)``.

    A group has one row for each rank, and rank r sums and normalises row r of every group. It reads only these rows of
    the residual, and writes only these rows of ``total``.

    x, residual, out, total: ``count`` elements, contiguous, in rows of SIZE; the last row may be shorter if it is not
    normalised. weight: [SIZE]. Inbox, outbox and pads have room for GROUPS groups.
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
