"""Searching rows of logits for the one from which on tokens weigh enough: the parts of `minisgl.kernels.threshold`.

The bits of a float, read as a whole number, have the order of the floats: that number is called its key here. What the
tokens from some key on weigh falls as the key rises, so that a search over keys finds the largest that is still enough.
"""

from __future__ import annotations

import triton
import triton.language as tl

FAR = tl.constexpr(2.0**100)
"""Logits are brought within ± this, so that differences are finite, divided by a temperature too, and times 0 are 0."""
_PIVOTS = tl.constexpr(16)
"""Keys that one pass over the candidates asks about."""


@triton.jit
def load_logits(pointers: tl.tensor, mask: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Logits as finite numbers in WIDE; NaN and what is masked count as −inf, and zero has one sign."""
    x = tl.load(pointers, mask=mask, other=float("-inf")).to(WIDE)
    x = tl.where(x > -FAR, tl.minimum(x, FAR), -FAR)
    return tl.where(x == 0, 0.0, x)


@triton.jit
def key_of(x: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    """Unsigned whole number in the order of the floats, without the lowest UNUSED bits, which are 0 in all of them.

    The bits of positive floats have their order already, below those of negative floats, which have the reverse order.
    """
    if x.dtype == tl.float64:
        bits = x.to(tl.uint64, bitcast=True)
        bits ^= tl.where(x < 0, 0xFFFFFFFFFFFFFFFF, 0x8000000000000000)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        bits ^= tl.where(x < 0, 0xFFFFFFFF, 0x80000000)
    return bits >> UNUSED


@triton.jit
def logit_of(key: tl.tensor, UNUSED: tl.constexpr) -> tl.tensor:
    """The float with this key: the inverse of `key_of`."""
    bits = key << UNUSED
    if key.dtype == tl.uint64:
        bits ^= tl.where(bits >= 0x8000000000000000, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF)
        x = bits.to(tl.float64, bitcast=True)
    else:
        bits ^= tl.where(bits >= 0x80000000, 0x80000000, (0xFFFFFFFF >> UNUSED) << UNUSED)
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def weight_of(x: tl.tensor, maximum: tl.tensor, inverse: tl.tensor) -> tl.tensor:
    """``exp((x − maximum) / temperature)``, given 1 / temperature; with 0 every token weighs 1, and is counted."""
    return tl.exp((x - maximum) * inverse)


@triton.jit
def load_candidates(
    row: tl.tuple, first: tl.tensor, CHUNK: tl.constexpr, ENTRIES: tl.constexpr, WIDE: tl.constexpr
) -> tl.tuple:
    """ENTRIES candidates of each of R rows, from number ``first`` on: logits, tokens, and which of them there are.

    Args:
        row: [R] pointers to the logits; [R] pointers to the list of chunks that hold the candidates, None for all;
            int32[R] its length; number of tokens in a row.
    """
    logits, listed, num_listed, vocab = row
    index = first + tl.arange(0, ENTRIES)[None, :]
    if listed is None:
        token = index + tl.zeros_like(num_listed)[:, None]
    else:
        chunk = tl.load(listed[:, None] + index // CHUNK, mask=index // CHUNK < num_listed[:, None], other=0)
        token = tl.max_contiguous(tl.multiple_of(chunk * CHUNK + index % CHUNK, [1, CHUNK]), [1, CHUNK])
    found = (index // CHUNK < num_listed[:, None]) & (token < vocab)
    return load_logits(logits[:, None] + token, found, WIDE), token, found


@triton.jit
def weigh_from(
    pivots: tl.tensor,
    row: tl.tuple,
    maximum: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED: tl.constexpr,
) -> tl.tensor:
    """What the candidates with at least each key weigh: [R, P] for pivots [R, P], one pass over the candidates.

    Every sum is made in an order that depends on the row's candidates alone, and with each key its result can only
    fall: rounding keeps the order of sums whose terms are in order.
    """
    sums = tl.zeros([pivots.shape[0], pivots.shape[1], ENTRIES], maximum.dtype)
    for first in range(0, tl.max(row[2]) * CHUNK, ENTRIES):
        x, _, _ = load_candidates(row, first, CHUNK, ENTRIES, maximum.dtype)
        weight = weight_of(x, maximum[:, None], inverse[:, None])
        sums += tl.where(key_of(x, UNUSED)[:, None, :] >= pivots[:, :, None], weight[:, None, :], 0.0)
    return tl.sum(sums, axis=2)


@triton.jit
def search(
    low: tl.tensor,
    high: tl.tensor,
    needed: tl.tensor,
    row: tl.tuple,
    maximum: tl.tensor,
    inverse: tl.tensor,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED: tl.constexpr,
) -> tl.tuple:
    """The largest key from ``low`` to ``high`` at and above which candidates weigh at least ``needed``, or ``low``.

    Each pass cuts the interval at 16 keys. The cuts that are enough come first, as weights fall with the key, so their
    number says in which of the 17 parts the answer lies.

    Args:
        low, high: [R] keys.
        needed: [R].
        row: as in `load_candidates`; none of them has a key above ``high``, where ``high`` is above ``low``.
        maximum, inverse: [R] as in `weight_of`.

    Returns:
        key: [R].
        above: [R], what candidates with a larger key weigh; 0 where ``high`` is ``low``.
    """
    cut = tl.arange(0, _PIVOTS)[None, :]
    above = tl.zeros_like(maximum)
    width = high - low + 1
    while tl.max(width) > 1:
        step = (width + _PIVOTS) // (_PIVOTS + 1)
        offset = step[:, None] * (cut + 1).to(step.dtype)
        weights = weigh_from(low[:, None] + offset, row, maximum, inverse, CHUNK, ENTRIES, UNUSED)
        inside = offset < width[:, None]
        enough = tl.sum((inside & (weights >= needed[:, None])).to(tl.int32), axis=1)
        not_enough = inside & (cut == enough[:, None])
        beyond = tl.sum(tl.where(not_enough, weights, 0.0), axis=1)
        above = tl.where(tl.max(not_enough.to(tl.int32), axis=1) == 1, beyond, above)
        passed = step * enough.to(step.dtype)
        low += passed
        width = tl.minimum(step, width - passed)
    return low, above


@triton.jit
def list_from(
    key: tl.tensor,
    row: tl.tuple,
    listed: tl.tensor,
    ENTRIES: tl.constexpr,
    UNUSED: tl.constexpr,
    WIDE: tl.constexpr,
) -> tl.tensor:
    """List the entries of each row that have at least its key, in order.

    Args:
        key: [R].
        row: as in `load_candidates`, all of it.
        listed: [R] pointers to where the list goes.

    Returns:
        int32[R], length of the list.
    """
    num_listed = tl.zeros_like(row[2])
    for first in range(0, tl.max(row[2]), ENTRIES):
        x, entry, found = load_candidates(row, first, 1, ENTRIES, WIDE)
        reaches = (found & (key_of(x, UNUSED) >= key[:, None])).to(tl.int32)
        place = num_listed[:, None] + tl.cumsum(reaches, axis=1) - 1
        tl.store(listed[:, None] + place, entry, mask=reaches == 1)
        num_listed += tl.sum(reaches, axis=1)
    tl.debug_barrier()  # what one thread has listed, others will read
    return num_listed


@triton.jit
def token_of_tie(
    logit: tl.tensor, number: tl.tensor, row: tl.tuple, CHUNK: tl.constexpr, ENTRIES: tl.constexpr
) -> tl.tensor:
    """int32[R]: the ``number``-th candidate, counted from 1, that equals ``logit``; the last if there are fewer."""
    seen = tl.zeros_like(number)
    last = tl.full(number.shape, -1, tl.int32)
    for first in range(0, tl.max(row[2]) * CHUNK, ENTRIES):
        x, token, found = load_candidates(row, first, CHUNK, ENTRIES, logit.dtype)
        tied = (found & (x == logit[:, None])).to(tl.int32)
        place = seen[:, None] + tl.cumsum(tied, axis=1)
        counts = (tied == 1) & (place <= number[:, None])
        last = tl.maximum(last, tl.max(tl.where(counts, token, -1), axis=1))
        seen += tl.sum(tied, axis=1)
    return last
