"""A constraint without a grammar: which tokens may come next is a hash of all that came before."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from minisgl.request import Int32Array, TokenConstraint

_MODULUS = (1 << 31) - 1


class Rule:
    """A `TokenConstraint` that always allows at least one token.

    Args:
        vocab: number of tokens, up to 32.
        seed: rules of different seeds allow different tokens. Those of odd seeds are never finished.
        breaks_at: accepting this many tokens is an error; None never is.
    """

    def __init__(self, vocab: int, seed: int, breaks_at: int | None = None) -> None:
        self.vocab = vocab
        self.accepted: list[int] = []
        self.error: str | None = None
        self._state = seed
        self._ends = seed % 2 == 0
        self._breaks_at = breaks_at

    @property
    def allowed(self) -> list[int]:
        """Tokens that may come next, ascending."""
        some = [token for token in range(self.vocab) if self._state >> token & 1]
        return some or [self._state % self.vocab]

    @property
    def finished(self) -> bool:
        return self._ends and bool(self.accepted) and self._state % 13 == 0

    def accept(self, token: int) -> None:
        if token not in self.allowed:
            self.error = f"token {token} is not allowed"
        self.accepted.append(token)
        self._state = (self._state * 48271 + token * 7919 + 11) % _MODULUS
        if len(self.accepted) == self._breaks_at:
            self.error = "the rule is broken"

    def fork(self) -> Rule:
        copy = Rule(self.vocab, self._state, self._breaks_at)
        copy.accepted, copy.error, copy._ends = list(self.accepted), self.error, self._ends
        return copy


def mask_of(allowed: Sequence[int], words: int = 1) -> Int32Array:
    """int32[words] with the bits of these tokens set."""
    bits = np.zeros(32 * words, dtype=np.uint8)
    bits[list(allowed)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def allowed_by(mask: Int32Array) -> list[int]:
    """The tokens whose bits are set in int32[words]."""
    tokens: list[int] = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()
    return tokens


class CountingMaskMaker:
    """A `MaskMaker` of rules, which keeps how many masks it was asked for at a time."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def __call__(self, constraints: Sequence[TokenConstraint]) -> Int32Array:
        self.calls.append(len(constraints))
        masks = []
        for constraint in constraints:
            assert isinstance(constraint, Rule)
            masks.append(mask_of(constraint.allowed))
        return np.stack(masks)
