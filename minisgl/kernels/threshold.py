"""Top-k, top-p and min-p without sorting the vocabulary: the logit of each row from which on tokens may be drawn.

Whatever the three leave are the likeliest tokens of a row, so one logit says all: what lies above it stays, what lies
below it goes, and of the tokens equal to it the first few stay. The twin, `minisgl.engine.logits_processors`, sorts to
find that logit; here it is searched for. The bits of a float, read as a whole number, have the order of the floats, and
the answer to "how much do the tokens from here on weigh?" only falls as that number, the key, rises. So every pass over
the tokens asks the question for 16 keys at once, which leaves a 17th of the interval (FlashInfer's sampling kernels
narrow an interval of probabilities likewise; Ye et al. 2025). Counting tokens for top-k is weighing them at an infinite
temperature, where each weighs 1.

Few tokens are looked at twice. The k-th largest among the maxima of chunks of the vocabulary is a lower bound of the
k-th largest logit, since k chunks hold a token as large: for k = 50 that leaves 50 chunks of 128 tokens. Likewise for
weights: if the chunk maxima from some logit on weigh enough, so do all tokens from there on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from minisgl.kernels.launch import INTERPRETED, wide
from minisgl.kernels.search import load_entries, key_of, search, value_of, weigh, weight_of

if TYPE_CHECKING:
    from minisgl.engine.sampling_stages import TopStage

_CHUNK = 128
_ENTRIES = 1024
"""Tokens, or chunks, that a program looks at together; of smaller vocabularies it takes several rows."""
_UNUSED_BITS = {torch.bfloat16: 16, torch.float16: 13}
"""How many of a float32's lowest bits are 0 in every number of a narrower type."""
_ALL = tl.constexpr(2**30)


class Thresholds(NamedTuple):
    """What may be drawn: tokens with a logit above their row's threshold, and those equal to it up to an id.

    Args:
        logit: [S] float32, or float64 for logits of that type.
        last_tied: [S] int32, the largest id at which a token equal to the threshold stays.
    """

    logit: torch.Tensor
    last_tied: torch.Tensor


@triton.jit
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

    logits: [S, vocab] with any row stride. temperature: float32[S]. maximum, weight: [S, num_chunks] in what is
    computed with.
    """
    pairs = tl.program_id(0).to(tl.int64) * CHUNKS + tl.arange(0, CHUNKS)
    row, chunk = pairs // num_chunks, (pairs % num_chunks).to(tl.int32)
    tokens = chunk[:, None] * CHUNK + tl.arange(0, CHUNK)[None, :]
    found = (row < num_rows)[:, None] & (tokens < vocab)
    x = load_entries(logits_ptr + row[:, None] * row_stride + tokens, found, maximum_ptr.dtype.element_ty)
    maximum = tl.max(x, axis=1)
    inverse = _inverse(temperature_ptr + row, row < num_rows, x.dtype)
    weight = tl.where(found, weight_of(x, maximum[:, None], inverse[:, None]), 0.0)
    tl.store(maximum_ptr + pairs, maximum, mask=row < num_rows)
    tl.store(weight_ptr + pairs, tl.sum(weight, axis=1), mask=row < num_rows)
