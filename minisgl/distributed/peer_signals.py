"""What ranks tell one another from inside a kernel: which call this is, and that something has been written.

A kernel that is recorded in a CUDA graph runs again and again with the same arguments, so nothing about a call can be
an argument. Each rank counts its calls on the device. All ranks make the same calls in the same order, so the number of
a call is the same everywhere, and a signal is nothing but that number, written into the memory of a peer. It never has
to be taken back: the next call has another number.

A rank that has waited in vain computes nonsense from then on. It falls silent, so that every other rank waits in vain
as well, and none passes nonsense on without knowing it.
"""

from __future__ import annotations

import triton
import triton.language as tl

CALL, POLLS = tl.constexpr(0), tl.constexpr(1)
"""Words of a rank's state, int64[2], in its own memory. CALL: the number of calls so far in the upper half, and in the
lower half how many programs of the present one have begun. POLLS: how often a program polls for a signal before it
gives up; 0 from then on, so that only the first call waits long, and later ones know that they must be silent."""


@triton.jit
def begin_call(state_ptr):
    """Number of this call, an int32 that is the same in all its programs and on all ranks.

    One addition both reads the number and counts the program in. The last program to begin moves the number on for the
    next call, because then nobody reads it any more.
    """
    before = tl.atomic_add(state_ptr + CALL, 1, sem="relaxed")
    call = (before >> 32) + 1
    if (before & 0xFFFFFFFF) == tl.num_programs(0) - 1:
        tl.store(state_ptr + CALL, call << 32)
    return call.to(tl.int32)


@triton.jit
def give_up(state_ptr, lost_ptr):
    """A peer does not answer. What this call returns is undefined, and so is all that comes after: see `may_speak`."""
    tl.store(state_ptr + POLLS, 0)
    tl.store(lost_ptr, 1)


@triton.jit
def may_speak(state_ptr):
    """Whether no call has given a peer up so far."""
    return tl.load(state_ptr + POLLS) > 0


@triton.jit
def memory_of(peers_ptr, peer, OFFSET: tl.constexpr, dtype: tl.constexpr):
    """Pointer into the piece of a peer, OFFSET bytes from its beginning.

    Args:
        peers_ptr: pointer to the addresses of all pieces, int64[ranks].
        peer: one rank, or a tensor of ranks.
    """
    return tl.multiple_of((tl.load(peers_ptr + peer) + OFFSET).to(tl.pointer_type(dtype)), 16)


@triton.jit
def signal(peers_ptr, pad, call, speaks, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Tell all ranks that this program has written what it has to: everything before is visible to who sees it.

    Args:
        pad: number of the signal pad, which has room for a word of each rank: int32[pads, RANKS] at OFFSET.
        speaks: False keeps silent.
    """
    tl.debug_barrier()  # the threads that signal speak for all threads of the program
    peers = tl.arange(0, triton.next_power_of_2(RANKS))
    exists = (peers < RANKS) & speaks
    pieces = tl.load(peers_ptr + peers, exists, other=0)
    words = (pieces + OFFSET).to(tl.pointer_type(tl.int32)) + pad * RANKS + RANK
    tl.atomic_xchg(words, tl.zeros_like(peers) + call, exists, sem="release", scope="sys")


@triton.jit
def wait(peers_ptr, state_ptr, lost_ptr, pad, call, OFFSET: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr):
    """Wait until all ranks have signalled this call: everything that they wrote before is visible afterwards.

    Returns:
        Whether they have; if not, they were given up.
    """
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
