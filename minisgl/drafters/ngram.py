"""Prompt lookup: what followed the last few tokens where they occurred before is likely to follow them again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.drafters.protocol import DraftRow, DraftTarget
from minisgl.request import Int32Array


class NgramDrafter:
    """Looks for the last n tokens of a request in its own prompt and output, and drafts what followed (Saxena 2023).

    The longest n wins, from `LONGEST` down to `SHORTEST`; among equals the latest occurrence whose continuation is as
    long as the draft may be. It keeps nothing between calls: a search takes some microseconds a thousand tokens.
    """

    LONGEST = 4
    SHORTEST = 2

    def __init__(self, target: DraftTarget) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow]) -> list[Int32Array]:
        return [self.look_up(row.tokens, row.count) for row in rows]

    def look_up(self, tokens: Int32Array, count: int) -> Int32Array:
        """Find up to ``count`` tokens to continue ``tokens``, int32[length]; an empty array without a match."""
        best = np.zeros(0, dtype=np.int32)
        # Ends of earlier occurrences of the last token, then of the last two tokens, and so on.
        ends = np.flatnonzero(tokens[:-1] == tokens[-1]) + 1
        for n in range(1, self.LONGEST + 1):
            if n > 1:
                ends = ends[ends >= n]
                ends = ends[tokens[ends - n] == tokens[-n]] if len(tokens) > n else ends[:0]
            if not len(ends):
                break
            if n >= self.SHORTEST:
                whole = ends[ends + count <= len(tokens)]
                begin = int(whole[-1] if len(whole) else ends[0])
                best = tokens[begin : begin + count].copy()
        return best

    def finish(self, uid: int, prompt_len: int, tokens: Int32Array) -> None:
        """Forget nothing, as nothing is kept."""
