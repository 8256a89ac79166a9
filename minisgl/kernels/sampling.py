"""Greedy and random sampling in one pass over the logits. The twin is `minisgl.engine.random.draw`.

The twin divides weights by exponentially distributed times and takes the largest quotient. In log space the softmax
that made the weights disappears, because dividing a whole row by its sum does not change which token is first:

    argmax(exp(logit / T) / sum / time)  =  argmax(logit / T − log(time))

What remains is one comparison a token, and the winner of a row is the best of the winners of its parts: hundreds of
programs search one row together, and a second, small kernel compares what they found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from minisgl.kernels.launch import INTERPRETED, wide


@triton.jit(do_not_specialize=["num_rows"])
def _winners_of_parts_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    key_low_ptr: tl.tensor,
    key_high_ptr: tl.tensor,
    threshold_ptr: tl.tensor,
    last_tied_ptr: tl.tensor,
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANDOM: tl.constexpr,
    LIMITED: tl.constexpr,
    WIDE: tl.constexpr,
    FAST_LOG: tl.constexpr,
) -> None:
    """One program ROWS rows and BLOCK tokens of the vocabulary: the best score among them and its token.

    logits: [S, vocab] with any row stride. temperature: float32[S], 0 for a greedy row; key_low, key_high: int32[S];
    all three are read if RANDOM. threshold: [S] in WIDE; last_tied: int32[S]; both are read if LIMITED.
    score: [S, parts] in WIDE. token: int32[S, parts].
    """
    part = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = part * BLOCK + tl.arange(0, BLOCK)
    row_exists = rows < num_rows
    exists = row_exists[:, None] & (tokens < vocab)[None, :]
    source = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + tokens[None, :]
    score = tl.load(source, mask=exists, other=float("-inf")).to(WIDE)
    score = tl.where(score == score, score, float("-inf"))  # NaN is no number to be compared with
    if LIMITED:
        threshold = tl.load(threshold_ptr + rows, mask=row_exists, other=0.0)[:, None]
        last_tied = tl.load(last_tied_ptr + rows, mask=row_exists, other=0)[:, None]
        stays = (score > threshold) | ((score == threshold) & (tokens[None, :] <= last_tied))
        score = tl.where(stays, score, float("-inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + rows, mask=row_exists, other=0.0).to(WIDE)
        key_low = tl.load(key_low_ptr + rows, mask=row_exists, other=0)
        key_high = tl.load(key_high_ptr + rows, mask=row_exists, other=0)
        random = temperature > 0
        log_time = _log_exponential(_token_hash(tokens[None, :], key_low[:, None], key_high[:, None]), FAST_LOG)
        inverse = 1.0 / tl.where(random, temperature, 1.0)
        score = score * inverse[:, None] - tl.where(random[:, None], log_time.to(WIDE), 0.0)

    best = tl.max(score, axis=1)
    winner = tl.min(tl.where(score == best[:, None], tokens[None, :], 2147483647), axis=1)
    target = rows * tl.num_programs(1) + part
    tl.store(score_ptr + target, best, mask=row_exists)
    tl.store(token_ptr + target, winner, mask=row_exists)


@triton.jit(do_not_specialize=["num_rows"])
def _winners_kernel(
    score_ptr: tl.tensor,
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_rows: tl.tensor,
    parts: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One program ROWS rows: the best of each row's parts. score, token: [S, parts], BLOCK ≥ parts. out: int32[S]."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    exists = (rows < num_rows)[:, None] & (columns < parts)[None, :]
    source = rows[:, None] * parts + columns[None, :]
    score = tl.load(score_ptr + source, mask=exists, other=float("-inf"))
    token = tl.load(token_ptr + source, mask=exists, other=2147483647)
    best = tl.max(score, axis=1)
    winner = tl.min(tl.where(score == best[:, None], token, 2147483647), axis=1)
    tl.store(out_ptr + rows, winner, mask=rows < num_rows)


@triton.jit
def _token_hash(token: tl.tensor, key_low: tl.tensor, key_high: tl.tensor) -> tl.tensor:
    """`minisgl.engine.random.token_hash`: two rounds of mixing, each after one half of the key."""
    bits = token.to(tl.uint32) * 0x9E3779B1 + key_low.to(tl.uint32, bitcast=True)
    return _mix(_mix(bits) ^ key_high.to(tl.uint32, bitcast=True))


@triton.jit
def _mix(bits: tl.tensor) -> tl.tensor:
    """MurmurHash3's finaliser (Appleby 2011)."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _log_exponential(hashes: tl.tensor, FAST_LOG: tl.constexpr) -> tl.tensor:
    """Logarithm of `minisgl.engine.random.exponentials`: ``log(−log(1 − v))`` with v in (0, 1) from 31 bits.

    Small times decide a draw. There ``1 − v`` has few digits left, so a series takes over below 1/16, where its first
    six terms are exact in float32. With FAST_LOG the GPU's own logarithm is taken, whose absolute error of 2**-22 is
    that of the scores.
    """
    v = ((hashes & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return _log(tl.where(v < 0.0625, series, -_log(1.0 - v, FAST_LOG)), FAST_LOG)


@triton.jit
def _log(x: tl.tensor, FAST_LOG: tl.constexpr) -> tl.tensor:
    return libdevice.fast_logf(x) if FAST_LOG else tl.log(x)


def sample_tokens(
    logits: torch.Tensor,
    random: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Sample one token a row. May be recorded in a CUDA graph.

    Args:
        logits: [S, vocab] of any floating-point dtype, each row contiguous.
        random: temperatures, float32[S] and 0 in greedy rows, and both halves of the keys, int32[S] each, see
            `minisgl.engine.random.draw_keys`; None if all rows are greedy.
        out: int32[S], receives the tokens. Among equal scores the lowest id wins; −inf wins against nothing else.
        thresholds: `minisgl.kernels.top_p.Thresholds`, what may be drawn in each row; None for every token.
    """
    num_rows, vocab = logits.shape
    # A row alone needs many small parts to fill the GPU; many rows need fewer and larger ones. A vocabulary smaller
    # than a part leaves room for several rows.
    block = min(triton.next_power_of_2(vocab), 1024 if logits.numel() < 2**22 else 2048)
    parts = triton.cdiv(vocab, block)
    rows = max(4096 // triton.next_power_of_2(vocab), 1)
    scores = torch.promote_types(logits.dtype, torch.float32)
    score = torch.empty((num_rows, parts), dtype=scores, device=logits.device)
    token = torch.empty((num_rows, parts), dtype=torch.int32, device=logits.device)
    _winners_of_parts_kernel[(triton.cdiv(num_rows, rows), parts)](
        logits,
        *(random or (out, out, out)),
        *(thresholds or (out, out)),
        score,
        token,
        num_rows,
        vocab,
        logits.stride(0),
        ROWS=rows,
        BLOCK=block,
        RANDOM=random is not None,
        LIMITED=thresholds is not None,
        WIDE=wide(logits.dtype),
        FAST_LOG=not INTERPRETED,
    )
    block = triton.next_power_of_2(parts)
    rows = max(1024 // block, 1)
    _winners_kernel[(triton.cdiv(num_rows, rows),)](score, token, out, num_rows, parts, ROWS=rows, BLOCK=block)
