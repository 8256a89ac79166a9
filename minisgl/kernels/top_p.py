"""Top-k, top-p and min-p without sorting: find the logit from which on a row's tokens may be drawn.

The bits of a float, read as an integer, are ordered like the floats: the logit's *sort key*. The weight of all tokens
from some key on falls as the key rises, so a search finds the largest threshold whose tokens still weigh enough. It
reads only *candidates*: the chunks of the row whose largest logit can reach the threshold.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED

# Logits are clamped to ± this, so that differences stay finite, even over a temperature, and times 0 are 0.
_MAX_LOGIT = tl.constexpr(2.0**100)
_NUM_PIVOTS = tl.constexpr(16)  # keys that one pass over the candidates asks about
_CHUNK = 128  # tokens of a chunk

# Tokens, or chunks, that a program looks at together, one a thread; of smaller vocabularies it takes several rows.
_ENTRIES = 512

# How many of a float32's lowest bits are 0 in every number of a narrower type.
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
_NO_LIMIT = tl.constexpr(2**30)  # room for every token that equals the threshold


class Thresholds(NamedTuple):
    """What may be drawn: tokens with a logit above their row's threshold, and those equal to it up to an id."""

    logit: torch.Tensor  # [S] float32, or float64 for logits of that type
    last_tied: torch.Tensor  # int32[S], the largest id at which a token equal to the threshold stays


def find_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    min_p: torch.Tensor | None,
) -> Thresholds:
    """Find what top-k, top-p and min-p leave, in two launches. May be captured in a CUDA graph.

    Equal to the twin but for rounding. Top-k is exact. Sums of weights have a relative error under 1e-5 in float32, so
    the last token of top-p may differ; min-p may differ for a token within three units in the last place of its bound.
    A row's thresholds depend on that row alone.

    Args:
        logits: [S, vocab] of any floating-point dtype, each row contiguous; fewer than 2**24 tokens.
        temperature: float32[S], 0 in greedy rows.
        top: rows that have top-k or top-p, int32[F], their k, int32[F], and their p, float32[F].
        min_p: float32[S], 0 where it is off.
    """
    num_rows, vocab = logits.shape
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    entries = max(min(_ENTRIES, triton.next_power_of_2(vocab)), chunk)
    rows, block = _ENTRIES // entries, 8 * _ENTRIES // chunk
    if INTERPRETED:  # whose programs take as long for few elements as for many
        rows, block = min(128 * rows, triton.next_power_of_2(max(num_rows, 1))), 128 * block
    scores = torch.promote_types(logits.dtype, torch.float32)
    maximum, weight = torch.empty((2, num_rows, num_chunks), dtype=scores, device=logits.device)
    listed = torch.empty((num_rows, num_chunks), dtype=torch.int32, device=logits.device)
    thresholds = Thresholds(
        torch.empty(num_rows, dtype=scores, device=logits.device),
        torch.empty(num_rows, dtype=torch.int32, device=logits.device),
    )
    _chunks_kernel[(triton.cdiv(num_rows * num_chunks, block),)](
        logits,
        temperature,
        maximum,
        weight,
        num_rows,
        vocab,
        logits.stride(0),
        num_chunks,
        CHUNK=chunk,
        CHUNKS=block,
    )
    top_row, top_k, top_p = top or (temperature,) * 3
    _threshold_kernel[(triton.cdiv(num_rows, rows),)](
        logits,
        temperature,
        top_row,
        top_k,
        top_p,
        temperature if min_p is None else min_p,
        maximum,
        weight,
        listed,
        *thresholds,
        num_rows,
        vocab,
        logits.stride(0),
        num_chunks,
        0 if top is None else len(top_row),
        ROWS=rows,
        CHUNK=chunk,
        CHUNKS=min(_ENTRIES, triton.next_power_of_2(num_chunks)),
        ENTRIES=entries,
        UNUSED_BITS=_UNUSED_BITS.get(logits.dtype, 0),
        MIN_P=min_p is not None,
        num_warps=16,
    )
    return thresholds


# Arrays of rows lie behind each other in memory, at places that differ from step to step.
@triton.jit(do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperature_ptr"])
def _chunks_kernel(
    logits_ptr: tl.tensor,  # [S, vocab]
    temperature_ptr: tl.tensor,  # float32[S]
    maximum_ptr: tl.tensor,  # [S, num_chunks] float32 or float64, written, as weight
    weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """Program c: CHUNKS chunks, counted through all rows: largest logit, and sum of weights relative to it."""
    pairs = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    row, chunk = pairs // num_chunks, pairs % num_chunks
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    found = (row < num_rows)[:, None] & (token < vocab)
    x = _load_logits(logits_ptr + row.to(tl.int64)[:, None] * row_stride + token, found, maximum_ptr.dtype.element_ty)
    maximum = tl.max(x, axis=1)
    inv_temp = 1.0 / _temperature(temperature_ptr + row, row < num_rows, x.dtype)
    weight = tl.where(found, _weight(x, maximum[:, None], inv_temp[:, None]), 0.0)
    tl.store(maximum_ptr + pairs, maximum, mask=row < num_rows)
    tl.store(weight_ptr + pairs, tl.sum(weight, axis=1), mask=row < num_rows)


@triton.jit(
    do_not_specialize=["num_rows", "num_top"],
    do_not_specialize_on_alignment=["temperature_ptr", "top_row_ptr", "top_k_ptr", "top_p_ptr", "min_p_ptr"],
)
def _threshold_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_row_ptr: tl.tensor,  # int32[F], as top_k
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,  # float32[F]
    min_p_ptr: tl.tensor,  # float32[S], read if MIN_P
    maximum_ptr: tl.tensor,  # of `_chunks_kernel`, as weight
    weight_ptr: tl.tensor,
    chunk_ptr: tl.tensor,  # int32[S, num_chunks], scratch memory
    threshold_ptr: tl.tensor,  # [S], written
    last_tied_ptr: tl.tensor,  # int32[S], written
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    num_chunks: tl.tensor,
    num_top: tl.tensor,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    MIN_P: tl.constexpr,
) -> None:
    """Program r: the thresholds of ROWS rows."""
    DTYPE: tl.constexpr = maximum_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    entry = _entry_of(rows, top_row_ptr, num_top)
    k = tl.load(top_k_ptr + entry, mask=entry >= 0, other=vocab)
    p = tl.load(top_p_ptr + entry, mask=entry >= 0, other=1.0).to(tl.float64)
    has_top_k, has_top_p = k < vocab, p < 1.0
    temperature = _temperature(temperature_ptr + rows, exists, DTYPE)
    inv_temp = 1.0 / temperature
    logits = logits_ptr + rows.to(tl.int64) * row_stride
    start = rows.to(tl.int64) * num_chunks
    chunks = maximum_ptr + start, None, tl.where(exists, num_chunks, 0), num_chunks

    maximum, total = _whole_row(chunks, weight_ptr + start, inv_temp, CHUNKS)
    lowest, highest = _sort_key(tl.full([ROWS], -_MAX_LOGIT, DTYPE), UNUSED_BITS), _sort_key(maximum, UNUSED_BITS)

    # A lower bound from the maxima of the chunks, and the list of those that reach it. A single chunk says nothing.
    searched = has_top_k | has_top_p
    needed = tl.where(has_top_k, k.to(tl.float64), p * total)
    rate = tl.where(has_top_k, 0.0, inv_temp)
    high = tl.where(searched & (num_chunks > 1), highest, lowest)
    low, _ = _search(lowest, high, needed, chunks, maximum, rate, 1, CHUNKS, UNUSED_BITS)
    num_listed = _list_from(tl.where(searched, low, highest + 1), chunks, chunk_ptr + start, CHUNKS, UNUSED_BITS, DTYPE)
    row = logits, chunk_ptr + start, num_listed, vocab

    # Top-k: the k-th largest logit, and how many of those equal to it are among the k.
    high = tl.where(has_top_k, highest, low)
    kth, above = _search(
        low, high, k.to(tl.float64), row, maximum, tl.zeros_like(inv_temp), CHUNK, ENTRIES, UNUSED_BITS
    )
    room_k = tl.where(has_top_k, k - above.to(tl.int32), _NO_LIMIT)

    # Top-p of what top-k has left, whose weight is summed first.
    left = total.to(tl.float64)
    if tl.max((has_top_k & has_top_p).to(tl.int32)) == 1:
        above = tl.sum(_weights_from((kth + 1)[:, None], row, maximum, inv_temp, CHUNK, ENTRIES, UNUSED_BITS), axis=1)
        tied = room_k.to(tl.float64) * _weight(_logit_of_key(kth, UNUSED_BITS), maximum, inv_temp)
        left = tl.where(has_top_k, above + tied, left)
    high = tl.where(has_top_p, highest, kth)
    key, above = _search(kth, high, p * left, row, maximum, inv_temp, CHUNK, ENTRIES, UNUSED_BITS)
    threshold = _logit_of_key(key, UNUSED_BITS)
    lacking = p * left - above
    room_p = tl.ceil(lacking / tl.maximum(_weight(threshold, maximum, inv_temp), 1e-30))
    room_p = tl.where(has_top_p, tl.clamp(room_p, 1.0, 1e9).to(tl.int32), _NO_LIMIT)
    room = tl.minimum(room_p, tl.where(key == kth, room_k, _NO_LIMIT))
    last_tied = _nth_tied_token(threshold, room, row, CHUNK, ENTRIES)

    if MIN_P:
        min_p = tl.load(min_p_ptr + rows, mask=exists, other=0.0).to(DTYPE)
        bound = maximum + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
        bound = tl.where(min_p > 0, bound, threshold)
        last_tied = tl.where(bound > threshold, vocab, last_tied)
        threshold = tl.maximum(threshold, bound)
    tl.store(threshold_ptr + rows, threshold, mask=exists)
    tl.store(last_tied_ptr + rows, last_tied, mask=exists)


@triton.jit
def _whole_row(chunks: tl.tuple, weights: tl.tensor, inv_temp: tl.tensor, CHUNKS: tl.constexpr) -> tl.tuple:
    """Return the largest logit of each row, and the sum of the row's weights relative to it; both [R].

    ``chunks`` are their maxima as candidates, ``weights`` [R] pointers to their weights.
    """
    maximum = tl.full(inv_temp.shape, -_MAX_LOGIT, inv_temp.dtype)
    for first in range(0, tl.max(chunks[2]), CHUNKS):
        x, _, _ = _load_candidates(chunks, first, 1, CHUNKS, inv_temp.dtype)
        maximum = tl.maximum(maximum, tl.max(x, axis=1))
    total = tl.zeros_like(inv_temp)
    for first in range(0, tl.max(chunks[2]), CHUNKS):
        x, chunk, found = _load_candidates(chunks, first, 1, CHUNKS, inv_temp.dtype)
        weight = tl.load(weights[:, None] + chunk, mask=found, other=0.0)
        total += tl.sum(weight * _weight(x, maximum[:, None], inv_temp[:, None]), axis=1)
    return maximum, total


@triton.jit
def _temperature(pointers: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Load temperatures, 1 for greedy rows."""
    temperature = tl.load(pointers, mask=mask, other=1.0).to(DTYPE)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _entry_of(rows: tl.tensor, top_row_ptr: tl.tensor, num_top: tl.tensor) -> tl.tensor:
    """Find each of the rows in the list of those that have top-k or top-p; −1 if it is not there."""
    entry = tl.full(rows.shape, -1, tl.int32)
    for first in range(0, num_top, 256):
        index = first + tl.arange(0, 256)
        listed = tl.load(top_row_ptr + index, mask=index < num_top, other=-1)
        entry = tl.maximum(entry, tl.max(tl.where(listed[None, :] == rows[:, None], index[None, :], -1), axis=1))
    return entry


@triton.jit
def _search(
    low: tl.tensor,
    high: tl.tensor,
    needed: tl.tensor,
    row: tl.tuple,
    maximum: tl.tensor,
    inv_temp: tl.tensor,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
) -> tl.tuple:
    """Find the largest key from ``low`` to ``high`` from which on candidates weigh at least ``needed``, or ``low``.

    Each pass cuts the interval at 16 keys. Weights fall with the key, so the cuts that are enough come first, and their
    number says in which of the 17 parts the answer lies. No candidate has a key above ``high``, unless that is ``low``.
    Returns the key and what candidates with a larger key weigh, 0 where ``high`` is ``low``. All are [R].
    """
    cut = tl.arange(0, _NUM_PIVOTS)[None, :]
    above = tl.zeros_like(maximum)
    width = high - low + 1
    while tl.max(width) > 1:
        step = (width + _NUM_PIVOTS) // (_NUM_PIVOTS + 1)
        offset = step[:, None] * (cut + 1).to(step.dtype)
        weights = _weights_from(low[:, None] + offset, row, maximum, inv_temp, CHUNK, ENTRIES, UNUSED_BITS)
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
def _weights_from(
    pivots: tl.tensor,
    row: tl.tuple,
    maximum: tl.tensor,
    inv_temp: tl.tensor,
    CHUNK: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
) -> tl.tensor:
    """Sum the weights of the candidates with at least each key: [R, P] for pivots [R, P], in one pass.

    The order of summing depends on the row's candidates alone, so a sum can only fall with its key: rounding keeps the
    order of sums whose terms are in order.
    """
    sums = tl.zeros([pivots.shape[0], pivots.shape[1], ENTRIES], maximum.dtype)
    for first in range(0, tl.max(row[2]) * CHUNK, ENTRIES):
        x, _, _ = _load_candidates(row, first, CHUNK, ENTRIES, maximum.dtype)
        weight = _weight(x, maximum[:, None], inv_temp[:, None])
        sums += tl.where(_sort_key(x, UNUSED_BITS)[:, None, :] >= pivots[:, :, None], weight[:, None, :], 0.0)
    return tl.sum(sums, axis=2)


@triton.jit
def _list_from(
    key: tl.tensor,
    row: tl.tuple,
    listed: tl.tensor,
    ENTRIES: tl.constexpr,
    UNUSED_BITS: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """List the entries of each row that have at least its ``key``, in order, at ``listed``; return how many."""
    num_listed = tl.zeros_like(row[2])
    for first in range(0, tl.max(row[2]), ENTRIES):
        x, entry, found = _load_candidates(row, first, 1, ENTRIES, DTYPE)
        reaches = (found & (_sort_key(x, UNUSED_BITS) >= key[:, None])).to(tl.int32)
        place = num_listed[:, None] + tl.cumsum(reaches, axis=1) - 1
        tl.store(listed[:, None] + place, entry, mask=reaches == 1)
        num_listed += tl.sum(reaches, axis=1)
    tl.debug_barrier()  # other threads will read the list
    return num_listed


@triton.jit
def _nth_tied_token(
    logit: tl.tensor, number: tl.tensor, row: tl.tuple, CHUNK: tl.constexpr, ENTRIES: tl.constexpr
) -> tl.tensor:
    """int32[R]: the ``number``-th candidate, counted from 1, that equals ``logit``; the last if there are fewer."""
    seen = tl.zeros_like(number)
    last = tl.full(number.shape, -1, tl.int32)
    for first in range(0, tl.max(row[2]) * CHUNK, ENTRIES):
        x, token, found = _load_candidates(row, first, CHUNK, ENTRIES, logit.dtype)
        tied = (found & (x == logit[:, None])).to(tl.int32)
        place = seen[:, None] + tl.cumsum(tied, axis=1)
        counts = (tied == 1) & (place <= number[:, None])
        last = tl.maximum(last, tl.max(tl.where(counts, token, -1), axis=1))
        seen += tl.sum(tied, axis=1)
    return last


@triton.jit
def _load_candidates(
    row: tl.tuple, first: tl.tensor, CHUNK: tl.constexpr, ENTRIES: tl.constexpr, DTYPE: tl.constexpr
) -> tl.tuple:
    """Load ENTRIES candidates of each of R rows, from number ``first`` on: logits, tokens, and which exist.

    ``row`` is [R] pointers to the logits; [R] pointers to the list of chunks that hold candidates, None for all chunks;
    int32[R] its length; and the number of tokens in a row.
    """
    logits, listed, num_listed, vocab = row
    index = first + tl.arange(0, ENTRIES)[None, :]
    if listed is None:
        token = index + tl.zeros_like(num_listed)[:, None]
    else:
        chunk = tl.load(listed[:, None] + index // CHUNK, mask=index // CHUNK < num_listed[:, None], other=0)
        token = tl.max_contiguous(tl.multiple_of(chunk * CHUNK + index % CHUNK, [1, CHUNK]), [1, CHUNK])
    found = (index // CHUNK < num_listed[:, None]) & (token < vocab)
    return _load_logits(logits[:, None] + token, found, DTYPE), token, found


@triton.jit
def _load_logits(pointers: tl.tensor, mask: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Load logits as finite numbers in DTYPE; NaN and masked ones count as −∞, and zero has one sign."""
    x = tl.load(pointers, mask=mask, other=float("-inf")).to(DTYPE)
    x = tl.where(x > -_MAX_LOGIT, tl.minimum(x, _MAX_LOGIT), -_MAX_LOGIT)
    return tl.where(x == 0, 0.0, x)


@triton.jit
def _sort_key(x: tl.tensor, UNUSED_BITS: tl.constexpr) -> tl.tensor:
    """Unsigned integer in the order of the floats, without the lowest UNUSED_BITS, which are 0 in all of them.

    The bits of positive floats are in order already, below those of negative floats, which are in reverse order.
    """
    if x.dtype == tl.float64:
        bits = x.to(tl.uint64, bitcast=True)
        bits ^= tl.where(x < 0, 0xFFFFFFFFFFFFFFFF, 0x8000000000000000)
    else:
        bits = x.to(tl.uint32, bitcast=True)
        bits ^= tl.where(x < 0, 0xFFFFFFFF, 0x80000000)
    return bits >> UNUSED_BITS


@triton.jit
def _logit_of_key(key: tl.tensor, UNUSED_BITS: tl.constexpr) -> tl.tensor:
    """The float with this key: the inverse of `_sort_key`."""
    bits = key << UNUSED_BITS
    if key.dtype == tl.uint64:
        bits ^= tl.where(bits >= 0x8000000000000000, 0x8000000000000000, 0xFFFFFFFFFFFFFFFF)
        x = bits.to(tl.float64, bitcast=True)
    else:
        bits ^= tl.where(bits >= 0x80000000, 0x80000000, (0xFFFFFFFF >> UNUSED_BITS) << UNUSED_BITS)
        x = bits.to(tl.float32, bitcast=True)
    return x


@triton.jit
def _weight(x: tl.tensor, maximum: tl.tensor, inv_temp: tl.tensor) -> tl.tensor:
    """``exp((x − maximum) / temperature)``, given 1 / temperature; given 0 it is 1, so that sums are counts."""
    return tl.exp((x - maximum) * inv_temp)
