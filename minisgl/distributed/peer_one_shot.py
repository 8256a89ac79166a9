"""The all-reduce of few bytes: every rank sends all that it has to every other, and each adds it up for itself.

One trip over NVLink is all the time there is, a microsecond, so nothing may cost a second one. Data and signal
therefore travel together: each eight bytes carry four bytes of data and the number of the call, and eight bytes arrive
whole or not at all (the low-latency protocol of NCCL). Who waits looks at the data itself until all of it is there.
What a rank sends is twice its data, times the peers: right for kilobytes, wrong for megabytes.

Two inboxes take turns. A peer writes into the one that this rank still reads only two calls later, and to get there it
has to have heard from this rank in between.
"""

from __future__ import annotations

import triton
import triton.language as tl

from minisgl.distributed.peer_signals import POLLS, begin_call, give_up, may_speak, memory_of


@triton.jit
def words_of(ptr):
    """The same memory as words of four bytes."""
    return ptr.to(tl.pointer_type(tl.int32))


@triton.jit
def numbers_in(words, dtype: tl.constexpr):
    """float32 numbers that words of four bytes hold, in the order in which memory has them: one a word, or two."""
    if dtype.primitive_bitwidth == 32:
        numbers = words.to(dtype, bitcast=True)
    else:
        lower = words.to(tl.int16).to(dtype, bitcast=True)
        upper = (words >> 16).to(tl.int16).to(dtype, bitcast=True)
        numbers = tl.interleave(lower, upper)
    return numbers.to(tl.float32)


@triton.jit
def send(words, here, part, peers_ptr, call, CAPACITY: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Write words into the inboxes of all peers, each with the number of the call.

    Args:
        words: int32[N].
        here: int32[N] their places in the inbox of a rank, which has CAPACITY words for each sender and each turn.
        part: bool[N] which of them to send.
    """
    signed = (call.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    turn = (call & 1) * RANKS + RANK
    for step in tl.static_range(1, RANKS):  # each rank begins with another peer
        inbox = memory_of(peers_ptr, (RANK + step) % RANKS, 0, tl.int64)
        tl.store(inbox + turn * CAPACITY + here, signed, mask=part)


@triton.jit
def missing_in(arrived, exists, call):
    """1 if a word of this call is not there yet."""
    return tl.max((exists & ((arrived >> 32).to(tl.int32) != call)).to(tl.int32))


@triton.jit
def receive(inbox, exists, arrived, state_ptr, lost_ptr, call):
    """Words that a peer has sent in this call, int32[N], once all are there.

    Args:
        inbox: pointers to where they will be.
        arrived: what is there at first sight.
    """
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
    """Sum in float32, in the order of the ranks, so that all of them get the same bits; then rounded."""
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
    x_ptr,
    out_ptr,
    peers_ptr,
    state_ptr,
    lost_ptr,
    num_words,
    CAPACITY: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BLOCK: tl.constexpr,
    USE_PDL: tl.constexpr,
):
    """One program for BLOCK words of x: ``out = sum of the x of all ranks``."""
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
