"""Counter-based random choice: it depends on a request's seed and position, not on slot, batch or preemption."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from minisgl.request import Int32Array

UInt64Array = npt.NDArray[np.uint64]


_GOLDEN_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_GOLDEN_INT32 = 0x9E3779B1 - 2**32  # as int32; odd, so that multiplying by it loses nothing
_MIX_1, _MIX_2 = 0x85EBCA6B - 2**32, 0xC2B2AE35 - 2**32


def splitmix64(state: UInt64Array) -> UInt64Array:
    """Output of SplitMix64 at ``state``, uint64[any] (Steele, Lea and Flood 2014): add the golden gamma, then mix."""
    z = state + _GOLDEN_GAMMA
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def draw_keys(keys: UInt64Array, output_index: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Return the 64-bit key of each row's draw as two int32[S], low half first.

    Number ``output_index``, int32[S], of the SplitMix64 stream that starts at the row's key, uint64[S]; the keys are
    hashed seeds, because seeds that differ by one would start streams close together.
    """
    bits = splitmix64(keys + output_index.astype(np.uint64) * _GOLDEN_GAMMA)
    return bits.astype(np.uint32).view(np.int32), (bits >> np.uint64(32)).astype(np.uint32).view(np.int32)


def token_hash(key_low: torch.Tensor, key_high: torch.Tensor, vocab: int) -> torch.Tensor:
    """Hash every token under each row's key: int32[S, vocab], distinct within a row, the same on every device.

    Two rounds of MurmurHash3's finaliser (Appleby 2011), each after one half of the key.
    """
    tokens = torch.arange(vocab, dtype=torch.int32, device=key_low.device) * _GOLDEN_INT32
    mixed = _mix_(tokens + key_low.unsqueeze(-1))
    return _mix_(mixed.bitwise_xor_(key_high.unsqueeze(-1)))


def _mix_(bits: torch.Tensor) -> torch.Tensor:
    # MurmurHash3's finaliser, in place. PyTorch's ``>>`` keeps the sign, so we mask the bits that it fills in.
    bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF)).mul_(_MIX_1)
    bits.bitwise_xor_((bits >> 13).bitwise_and_(0x7FFFF)).mul_(_MIX_2)
    return bits.bitwise_xor_((bits >> 16).bitwise_and_(0xFFFF))


def exponentials(hashes: torch.Tensor) -> torch.Tensor:
    """Exponential variates, float32 in [2**-32, 17]: ``−log(1 − v)`` for v in (0, 1) from 31 bits of each hash."""
    v = (hashes & 0x7FFFFFFF).float().add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return v.neg_().log1p_().neg_()


def draw(weights: torch.Tensor, key_low: torch.Tensor, key_high: torch.Tensor) -> torch.Tensor:
    """Draw one token a row, [S] int64, in proportion to ``weights``, [S, vocab] float32 or float64, not negative.

    Token t arrives after an exponentially distributed time with rate ``weights[t]``, and the first wins (the Gumbel-max
    trick without logarithms; Maddison et al. 2014). The largest weight of a row must not be tiny. A weight of 0 wins
    only in a row without a positive one; such a row, or one with a NaN, gives an unspecified token.
    """
    # One uniform number on the line of cumulative weights would need less noise, but rounding errors, which differ with
    # the shape of the batch, would move a boundary across it once in a few hundred draws. In a race they matter only
    # if the first two arrive within rounding error of each other.
    times = exponentials(token_hash(key_low, key_high, weights.shape[-1]))
    return (weights / times).argmax(-1)
