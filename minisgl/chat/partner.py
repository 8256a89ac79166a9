"""Who answers in a chat."""

from __future__ import annotations

from collections.abc import Generator
from typing import Protocol

from minisgl.errors import MiniSGLError

Messages = list[dict[str, str]]


class NoAnswer(MiniSGLError):
    """The partner cannot be reached, or refuses; the message says why."""


class NoServer(NoAnswer):
    """Nobody listens at the server's address."""


class Partner(Protocol):
    """Takes a conversation and goes on with it."""

    name: str

    def answer(self, messages: Messages) -> Generator[str, None, str]:
        """Text as it comes. Closing the generator ends the answer, wherever it is computed.

        Returns:
            Why it ended, as the API's ``finish_reason``.

        Raises:
            MiniSGLError: there is no answer, or no more of it.
        """
        ...
