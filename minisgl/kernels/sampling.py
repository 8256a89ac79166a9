"""Greedy and random sampling in one pass over the logits. The twin is `minisgl.engine.random.draw`.

The twin divides each token's weight by an exponentially distributed time and takes the largest quotient. In log space
the softmax disappears, because its sum does not change which token wins:

    argmax(exp(logit / T) / sum / time)  =  argmax(logit / T − log(time))

So hundreds of programs search one row together, and a second, small kernel compares what they found.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from minisgl.kernels.launch import INTERPRETED, compute_dtype


def sample_tokens(
    logits: torch.Tensor,
    random: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
    out: torch.Tensor,
    thresholds: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """Sample one token a row, and write it to ``out``, int32[S]. May be captured in a CUDA graph.

    Among equal scores the lowest id wins; a token at −∞ wins only if all others are at −∞ too.

    Args:
        logits: [S, vocab] of any floating-point dtype, each row contiguous.
        random: temperatures, float32[S] and 0 in greedy rows, and the two halves of the keys, int32[S] each, from
            `minisgl.engine.random.draw_keys`; None if all rows are greedy.
        thresholds: `minisgl.kernels.top_p.Thresholds`, which tokens may be drawn; None: all.
    """
    num_rows, vocab = logits.shape
    # A single row needs many small blocks to fill the GPU; many rows need fewer and larger ones. A vocabulary smaller
    # than a block leaves room for several rows.
    block_size = min(triton.next_power_of_2(vocab), 1024 if logits.numel() < 2**22 else 2048)
    num_blocks = triton.cdiv(vocab, block_size)
    rows = max(4096 // triton.next_power_of_2(vocab), 1)
    scores = torch.promote_types(logits.dtype, torch.float32)
    score = torch.empty((num_rows, num_blocks), dtype=scores, device=logits.device)
    token = torch.empty((num_rows, num_blocks), dtype=torch.int32, device=logits.device)
    _block_argmax_kernel[(triton.cdiv(num_rows, rows), num_blocks)](
        logits,
        *(random or (out, out, out)),
        *(thresholds or (out, out)),
        score,
        token,
        num_rows,
        vocab,
        logits.stride(0),
        ROWS=rows,
        BLOCK=block_size,
        RANDOM=random is not None,
        HAS_THRESHOLD=thresholds is not None,
        DTYPE=compute_dtype(logits.dtype),
        FAST_LOG=not INTERPRETED,
    )
    block_size = triton.next_power_of_2(num_blocks)
    rows = max(1024 // block_size, 1)
    _argmax_kernel[(triton.cdiv(num_rows, rows),)](score, token, out, num_rows, num_blocks, ROWS=rows, BLOCK=block_size)


# Arrays of rows lie behind each other in memory, at places that differ from step to step.
@triton.jit(
    do_not_specialize=["num_rows"], do_not_specialize_on_alignment=["temperature_ptr", "key_low_ptr", "key_high_ptr"]
)
def _block_argmax_kernel(
    logits_ptr: tl.tensor,  # [S, vocab]
    temperature_ptr: tl.tensor,  # float32[S], 0 for a greedy row; read if RANDOM
    key_low_ptr: tl.tensor,  # int32[S], as key_high; read if RANDOM
    key_high_ptr: tl.tensor,
    threshold_ptr: tl.tensor,  # [S] in DTYPE, read if HAS_THRESHOLD
    last_tied_ptr: tl.tensor,  # int32[S], read if HAS_THRESHOLD
    score_ptr: tl.tensor,  # [S, blocks] in COMPUTE_DTYPE, written
    token_ptr: tl.tensor,  # int32[S, blocks], written
    num_rows: tl.tensor,
    vocab: tl.tensor,
    row_stride: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    RANDOM: tl.constexpr,
    HAS_THRESHOLD: tl.constexpr,
    DTYPE: tl.constexpr,
    FAST_LOG: tl.constexpr,
) -> None:
    """Program (r, b): the best score of ROWS rows among the tokens of block b, and its token."""
    block = tl.program_id(1)
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    tokens = block * BLOCK + tl.arange(0, BLOCK)
    row_exists = rows < num_rows
    exists = row_exists[:, None] & (tokens < vocab)[None, :]
    source = logits_ptr + rows.to(tl.int64)[:, None] * row_stride + tokens[None, :]
    score = tl.load(source, mask=exists, other=float("-inf")).to(DTYPE)
    score = tl.where(score == score, score, float("-inf"))  # NaN cannot be compared
    if HAS_THRESHOLD:
        threshold = tl.load(threshold_ptr + rows, mask=row_exists, other=0.0)[:, None]
        last_tied = tl.load(last_tied_ptr + rows, mask=row_exists, other=0)[:, None]
        stays = (score > threshold) | ((score == threshold) & (tokens[None, :] <= last_tied))
        score = tl.where(stays, score, float("-inf"))
    if RANDOM:
        temperature = tl.load(temperature_ptr + rows, mask=row_exists, other=0.0).to(DTYPE)
        key_low = tl.load(key_low_ptr + rows, mask=row_exists, other=0)
        key_high = tl.load(key_high_ptr + rows, mask=row_exists, other=0)
        random = temperature > 0
        log_time = _log_exponential(_token_hash(tokens[None, :], key_low[:, None], key_high[:, None]), FAST_LOG)
        inverse = 1.0 / tl.where(random, temperature, 1.0)
        score = score * inverse[:, None] - tl.where(random[:, None], log_time.to(DTYPE), 0.0)

    best = tl.max(score, axis=1)
    winner = tl.min(tl.where(score == best[:, None], tokens[None, :], 2147483647), axis=1)
    target = rows * tl.num_programs(1) + block
    tl.store(score_ptr + target, best, mask=row_exists)
    tl.store(token_ptr + target, winner, mask=row_exists)


@triton.jit(do_not_specialize=["num_rows"])
def _argmax_kernel(
    score_ptr: tl.tensor,  # [S, num_blocks], as token
    token_ptr: tl.tensor,
    out_ptr: tl.tensor,  # int32[S]
    num_rows: tl.tensor,
    num_blocks: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,  # num_blocks or more
) -> None:
    """Program r: the best of the blocks of ROWS rows."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK)
    exists = (rows < num_rows)[:, None] & (columns < num_blocks)[None, :]
    source = rows[:, None] * num_blocks + columns[None, :]
    score = tl.load(score_ptr + source, mask=exists, other=float("-inf"))
    token = tl.load(token_ptr + source, mask=exists, other=2147483647)
    best = tl.max(score, axis=1)
    winner = tl.min(tl.where(score == best[:, None], token, 2147483647), axis=1)
    tl.store(out_ptr + rows, winner, mask=rows < num_rows)


@triton.jit
def _token_hash(token: tl.tensor, key_low: tl.tensor, key_high: tl.tensor) -> tl.tensor:
    """Twin of `minisgl.engine.random.token_hash`: two rounds of mixing, each after adding one half of the key."""
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

    Small times decide a draw, and for them ``1 − v`` has few digits left. So below 1/16 a series takes over, whose
    first six terms are exact in float32. FAST_LOG takes the GPU's own logarithm, whose absolute error of 2**-22 is that
    of the scores.
    """
    v = ((hashes & 0x7FFFFFFF).to(tl.int32).to(tl.float32) + 0.5) * (2.0**-31)
    v = tl.minimum(v, 1.0 - 2.0**-24)
    series = v * (1.0 + v * (1 / 2 + v * (1 / 3 + v * (1 / 4 + v * (1 / 5 + v * (1 / 6))))))
    return _log(tl.where(v < 0.0625, series, -_log(1.0 - v, FAST_LOG)), FAST_LOG)


@triton.jit
def _log(x: tl.tensor, FAST_LOG: tl.constexpr) -> tl.tensor:
    return libdevice.fast_logf(x) if FAST_LOG else tl.log(x)
