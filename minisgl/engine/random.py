"""Random choice without a generator's state: a hash gives each draw its uniform number, which picks one token.

Both halves are pure functions. What a request draws depends on its seed and on how many tokens it has generated, never
on the slot it is in, on the other rows of the batch, or on whether it was preempted and computed again.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from minisgl.core.request import Int32Array

UInt64Array = npt.NDArray[np.uint64]

_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_BLOCK = 128  # tokens; divides the vocabulary of most models


def splitmix64(state: UInt64Array) -> UInt64Array:
    """The output of SplitMix64 at ``state`` (Steele, Lea and Flood 2014): add the golden gamma, then mix.

    Args:
        state: uint64[any].

    Returns:
        uint64, same shape, equidistributed over all 64-bit numbers.
    """
    z = state + _GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniforms(keys: UInt64Array, output_index: Int32Array) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each row, a multiple of 2**-53.

    SplitMix64 is a counter with a good hash behind it, so its n-th number is reached in one step: this is number
    ``output_index`` of the stream that starts at ``key``. Seeds that differ by one would start streams close
    together; `SamplingTable` therefore uses the hash of the seed as key.

    Args:
        keys: uint64[S], ``splitmix64(seed)`` of each row.
        output_index: int32[S], how many tokens each row has generated before this one.
    """
    bits = splitmix64(keys + output_index.astype(np.uint64) * _GOLDEN_GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def draw(weights: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw one token a row by inverting the cumulative distribution.

    One uniform number a row is enough: lay the weights end to end on a line of length ``total``, and the token under
    the point ``uniform × total`` is drawn with a probability of exactly its share.

    A running float32 sum over 150,000 tokens would lose every token whose share is under 2**-24 of what was summed
    before it. So the line is searched in two steps: float32 sums over blocks of 128 tokens (relative error about
    1e-6) are accumulated in float64 to find the block, and the block's own weights in float64 to find the token.

    A token of weight 0 is never drawn: both searches look for the first cumulative sum *above* the target, which is a
    place where the sum grows, and both targets are below the last sum. For the first, ``uniform`` is at most
    1 − 2**-53, so its float64 product with the total rounds to less than the total. The second is limited to the
    number before the block's total, which can differ from the float32 sum by rounding.

    Args:
        weights: [S, vocab] float32 or float64, not negative, need not add up to 1.
        uniform: [S] float64 in [0, 1).

    Returns:
        [S] int64. A row with no positive weight, or with a NaN, gives an unspecified token of the vocabulary.
    """
    vocab = weights.shape[-1]
    if vocab % _BLOCK:
        weights = F.pad(weights, (0, _BLOCK - vocab % _BLOCK))
    blocks = weights.reshape(len(weights), -1, _BLOCK)
    bounds = F.pad(blocks.sum(-1).double().cumsum(-1), (1, 0))  # block b covers bounds[b] … bounds[b + 1]
    target = uniform.unsqueeze(-1) * bounds[:, -1:]
    block = (torch.searchsorted(bounds, target, right=True) - 1).clamp(0, blocks.shape[1] - 1)
    inside = target - bounds.gather(-1, block)

    chosen = blocks.gather(1, block.unsqueeze(-1).expand(-1, -1, _BLOCK)).squeeze(1)
    sums = chosen.double().cumsum(-1)
    last = sums[:, -1:]
    inside = torch.minimum(inside, torch.nextafter(last, torch.zeros_like(last)))
    offset = torch.searchsorted(sums, inside, right=True)
    return (block * _BLOCK + offset).squeeze(-1).clamp(max=vocab - 1)
