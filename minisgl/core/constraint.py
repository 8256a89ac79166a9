"""The protocol between the scheduler and whatever decides which tokens a request may generate next."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from minisgl.core.request import Int32Array


class TokenConstraint(Protocol):
    """A state machine on the host that follows one request's output, token by token.

    Chapter 15 tells of grammars, the constraint that comes with the engine (`minisgl.grammar`).
    """

    @property
    def finished(self) -> bool:
        """True once the output is complete and nothing but its end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the output cannot go on: it has a token that was not allowed, or following it takes too much."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token of the output. Tokens that end the request are tokens, too."""
        ...


MaskMaker = Callable[[Sequence[TokenConstraint]], Int32Array]
"""Makes the masks of a step, int32[C, words], for C constraints in the states in which they are.

Words hold 32 tokens each, the lowest bit the lowest id: bit ``t % 32`` of word ``t // 32`` is set if token t may come
next. There are enough words for the model's vocabulary, and further bits mean nothing.
"""
