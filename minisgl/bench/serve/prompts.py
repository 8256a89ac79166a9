"""Tokens of prompts out of numbers: the same block gives the same tokens every time, on every machine."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from minisgl.bench.serve.traces import Blocks

_OWN_TOKENS = 2**62
"""Ids from here on belong to single requests; those of traces are smaller."""


def prompt_tokens(index: int, length: int, blocks: Blocks | None, vocab_size: int, seed: int) -> list[int]:
    """The prompt of one request: the tokens of its blocks, and then as many of its own as it takes.

    A token is a hash of its block, its place in the block, and ``seed``. So two prompts share exactly the prefix that
    their blocks share, and prompts under another seed share nothing with what a server still has in its cache.

    Args:
        index: of the request, unique in a run.
        length: in tokens.
        blocks: that it is made of; None if it has only tokens of its own.
        vocab_size: ids lie below this.
        seed: of the run.
    """
    size = blocks.size if blocks else length
    ids = np.array([*(blocks.ids if blocks else ()), _OWN_TOKENS + index], dtype=np.uint64)
    places = np.arange(length, dtype=np.uint64)
    block_of = np.minimum(places // np.uint64(size), np.uint64(len(ids) - 1)).astype(np.intp)
    of_block = _hash(_hash(np.uint64(seed)) ^ ids[block_of])
    tokens: list[int] = (_hash(of_block ^ (places % np.uint64(size))) % np.uint64(vocab_size)).tolist()
    return tokens


def _hash(value: Any) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014): every bit of the result depends on every bit given."""
    with np.errstate(over="ignore"):
        mixed = np.asarray(value, dtype=np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
