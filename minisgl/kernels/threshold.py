"""Top-k, top-p and min-p without sorting the vocabulary: the logit of each row from which on tokens may be drawn.

Whatever the three leave are the likeliest tokens of a row, so one logit says all: what lies above it stays, what lies
below it goes, and of the tokens equal to it the first few stay. The twin, `minisgl.engine.logits_processors`, sorts to
find that logit; here `minisgl.kernels.search` narrows it down to a 17th of the interval in every pass over the row
(FlashInfer's kernels narrow an interval of probabilities likewise; Ye et al. 2025).

Few tokens are passed over more than once. The k-th largest among the maxima of chunks of the vocabulary is a lower
bound of the k-th largest logit, since k chunks hold a token as large: for k = 50 that leaves 50 chunks of 128 tokens.
Likewise for weights: if the chunk maxima from some logit on weigh enough, so do all tokens from there on.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED
from minisgl.kernels.search import (
    FAR,
    key_of,
    list_from,
    load_candidates,
    load_logits,
    logit_of,
    search,
    token_of_tie,
    weigh_from,
    weight_of,
)

_CHUNK = 128
_ENTRIES = 512
"""Tokens, or chunks, that a program looks at together, one a thread; of smaller vocabularies it takes several rows."""
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""How many of a float32's lowest bits are 0 in every number of a narrower type."""
_ALL = tl.constexpr(2**30)
"""Room for every token that equals the threshold."""


class Thresholds(NamedTuple):
    """What may be drawn: tokens with a logit above their row's threshold, and those equal to it up to an id.

    Args:
        logit: [S] float32, or float64 for logits of that type.
        last_tied: [S] int32, the largest id at which a token equal to the threshold stays.
    """

    logit: torch.Tensor
    last_tied: torch.Tensor


@triton.jit(do_not_specialize=["num_rows"])
def _chunks_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    num_chunks: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    """One program CHUNKS chunks, counted through all rows: their largest logit, and their weight if that weighs 1.

    logits: [S, vocab] with any row stride. temperature: float32[S]. maximum, weight: [S, num_chunks], float32 or
    float64.
    """
    pairs = tl.program_id(0) * CHUNKS + tl.arange(0, CHUNKS)
    row, chunk = pairs // num_chunks, pairs % num_chunks
    token = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    found = (row < num_rows)[:, None] & (token < vocab)
    x = load_logits(logits_ptr + row.to(tl.int64)[:, None] * row_stride + token, found, maximum_ptr.dtype.element_ty)
    maximum = tl.max(x, axis=1)
    inverse = 1.0 / _temperature(temperature_ptr + row, row < num_rows, x.dtype)
    weight = tl.where(found, weight_of(x, maximum[:, None], inverse[:, None]), 0.0)
    tl.store(maximum_ptr + pairs, maximum, mask=row < num_rows)
    tl.store(weight_ptr + pairs, tl.sum(weight, axis=1), mask=row < num_rows)


@triton.jit(do_not_specialize=["num_rows", "num_top"])
def _threshold_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_row_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    maximum_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    chunk_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    last_tied_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    num_chunks: tl.tensor,
    num_top: tl.tensor,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
    ENTRIES: tl.constexpr,
    UNUSED: tl.constexpr,
    MIN_P: tl.constexpr,
) -> None:
    """One program ROWS rows: their thresholds.

    top_row, top_k: int32[F]; top_p: float32[F]. min_p: float32[S], read if MIN_P. maximum, weight: of `_chunks_kernel`.
    chunk: int32[S, num_chunks], for its own use. threshold: [S]. last_tied: int32[S].
    """
    WIDE: tl.constexpr = maximum_ptr.dtype.element_ty
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = rows < num_rows
    entry = _entry_of(rows, top_row_ptr, num_top)
    k = tl.load(top_k_ptr + entry, mask=entry >= 0, other=vocab)
    p = tl.load(top_p_ptr + entry, mask=entry >= 0, other=1.0).to(tl.float64)
    counted, weighed = k < vocab, p < 1.0
    temperature = _temperature(temperature_ptr + rows, exists, WIDE)
    inverse = 1.0 / temperature
    logits = logits_ptr + rows.to(tl.int64) * row_stride
    start = rows.to(tl.int64) * num_chunks
    chunks = maximum_ptr + start, None, tl.where(exists, num_chunks, 0), num_chunks

    maximum, total = _whole_row(chunks, weight_ptr + start, inverse, CHUNKS)
    lowest, highest = key_of(tl.full([ROWS], -FAR, WIDE), UNUSED), key_of(maximum, UNUSED)

    # A lower bound from the maxima of the chunks, and the list of those that reach it. A single chunk says nothing.
    searched = counted | weighed
    needed = tl.where(counted, k.to(tl.float64), p * total)
    rate = tl.where(counted, 0.0, inverse)
    high = tl.where(searched & (num_chunks > 1), highest, lowest)
    low, _ = search(lowest, high, needed, chunks, maximum, rate, 1, CHUNKS, UNUSED)
    num_listed = list_from(tl.where(searched, low, highest + 1), chunks, chunk_ptr + start, CHUNKS, UNUSED, WIDE)
    row = logits, chunk_ptr + start, num_listed, vocab

    # Top-k: the k-th largest logit, and how many of those equal to it are among the k.
    high = tl.where(counted, highest, low)
    kth, above = search(low, high, k.to(tl.float64), row, maximum, tl.zeros_like(inverse), CHUNK, ENTRIES, UNUSED)
    room_k = tl.where(counted, k - above.to(tl.int32), _ALL)

    # Top-p of what that left, which is weighed first.
    left = total.to(tl.float64)
    if tl.max((counted & weighed).to(tl.int32)) == 1:
        above = tl.sum(weigh_from((kth + 1)[:, None], row, maximum, inverse, CHUNK, ENTRIES, UNUSED), axis=1)
        tied = room_k.to(tl.float64) * weight_of(logit_of(kth, UNUSED), maximum, inverse)
        left = tl.where(counted, above + tied, left)
    high = tl.where(weighed, highest, kth)
    key, above = search(kth, high, p * left, row, maximum, inverse, CHUNK, ENTRIES, UNUSED)
    threshold = logit_of(key, UNUSED)
    lacking = p * left - above
    room_p = tl.ceil(lacking / tl.maximum(weight_of(threshold, maximum, inverse), 1e-30))
    room_p = tl.where(weighed, tl.clamp(room_p, 1.0, 1e9).to(tl.int32), _ALL)
    room = tl.minimum(room_p, tl.where(key == kth, room_k, _ALL))
    last_tied = token_of_tie(threshold, room, row, CHUNK, ENTRIES)

    if MIN_P:
        min_p = tl.load(min_p_ptr + rows, mask=exists, other=0.0).to(WIDE)
        bound = maximum + temperature * tl.log(tl.where(min_p > 0, min_p, 1.0))
        bound = tl.where(min_p > 0, bound, threshold)
        last_tied = tl.where(bound > threshold, vocab, last_tied)
        threshold = tl.maximum(threshold, bound)
    tl.store(threshold_ptr + rows, threshold, mask=exists)
    tl.store(last_tied_ptr + rows, last_tied, mask=exists)


@triton.jit
def _whole_row(chunks: tl.tuple, weights: tl.tensor, inverse: tl.tensor, CHUNKS: tl.constexpr) -> tl.tuple:
    """The largest logit of each row, and what the whole row weighs if that weighs 1; both [R].

    Args:
        chunks: their maxima, as candidates.
        weights: [R] pointers to their weights.
        inverse: [R] 1 / temperature.
    """
    maximum = tl.full(inverse.shape, -FAR, inverse.dtype)
    for first in range(0, tl.max(chunks[2]), CHUNKS):
        x, _, _ = load_candidates(chunks, first, 1, CHUNKS, inverse.dtype)
        maximum = tl.maximum(maximum, tl.max(x, axis=1))
    total = tl.zeros_like(inverse)
    for first in range(0, tl.max(chunks[2]), CHUNKS):
        x, chunk, found = load_candidates(chunks, first, 1, CHUNKS, inverse.dtype)
        weight = tl.load(weights[:, None] + chunk, mask=found, other=0.0)
        total += tl.sum(weight * weight_of(x, maximum[:, None], inverse[:, None]), axis=1)
    return maximum, total


@triton.jit
def _temperature(pointers: tl.tensor, mask: tl.tensor, WIDE: tl.constexpr) -> tl.tensor:
    """Temperatures, 1 for greedy rows."""
    temperature = tl.load(pointers, mask=mask, other=1.0).to(WIDE)
    return tl.where(temperature > 0, temperature, 1.0)


@triton.jit
def _entry_of(rows: tl.tensor, top_row_ptr: tl.tensor, num_top: tl.tensor) -> tl.tensor:
    """Where each of the rows is in the list of those that have top-k or top-p; −1 if it is not."""
    entry = tl.full(rows.shape, -1, tl.int32)
    for first in range(0, num_top, 256):
        index = first + tl.arange(0, 256)
        listed = tl.load(top_row_ptr + index, mask=index < num_top, other=-1)
        entry = tl.maximum(entry, tl.max(tl.where(listed[None, :] == rows[:, None], index[None, :], -1), axis=1))
    return entry


def find_thresholds(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    min_p: torch.Tensor | None,
) -> Thresholds:
    """What top-k, top-p and min-p leave, in two launches. May be recorded in a CUDA graph.

    Equal to the twin but for rounding. Sums of weights have a relative error under 1e-5 in float32, so the last token
    of top-p may be another where the weights up to it, as a share, come that close to p; and min-p may decide otherwise
    about a token whose logit is within three units in the last place of its bound. Top-k is exact. A row's thresholds
    depend on nothing but the row.

    Args:
        logits: [S, vocab] of any floating-point dtype, each row contiguous; fewer than 2**24 tokens.
        temperature: [S] float32, 0 in greedy rows.
        top: rows that have top-k or top-p, int32[F], their k, int32[F], and their p, float32[F].
        min_p: [S] float32, 0 where it is off.
    """
    num_rows, vocab = logits.shape
    chunk = min(_CHUNK, triton.next_power_of_2(vocab))
    num_chunks = triton.cdiv(vocab, chunk)
    entries = max(min(_ENTRIES, triton.next_power_of_2(vocab)), chunk)
    rows, block = _ENTRIES // entries, 8 * _ENTRIES // chunk
    if INTERPRETED:  # which takes as long for a program of few elements as for one of many
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
        UNUSED=_UNUSED_BITS.get(logits.dtype, 0),
        MIN_P=min_p is not None,
        num_warps=16,
    )
    return thresholds
