"""What is remembered of a request while it is served, for the metrics and for its line in the log. No text."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from starlette.requests import Request
from starlette.types import Scope

from minisgl.messages import Update
from minisgl.server.formats import Usage

_KEY = "minisgl.record"


@dataclass(slots=True)
class RequestRecord:
    """One request, from its arrival to the last byte of its answer. Times are seconds of ``time.perf_counter``.

    Args:
        request_id: the client's own, or one made up for it; sent back as ``x-request-id``.
        arrived: when its head had been read.
        endpoint: the route's path, as the program writes it, so that there are few; ``"other"`` where none fits.
        status: of the answer; 499 if the client left before there was one.
        code: of the error, if the answer tells one.
        streamed: whether tokens are sent as they come.
        usage: its tokens, once the engine has accepted it.
        choices: generations that the engine has accepted.
        finish_reasons: of the choices that have ended.
        queue_time: longest time that one of its choices waited for its first step, in seconds.
        first_token: when the first token arrived, if streamed.
    """

    request_id: str
    arrived: float = field(default_factory=time.perf_counter)
    endpoint: str = "other"
    status: int = 499
    code: str | None = None
    streamed: bool = False
    usage: Usage | None = None
    choices: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    queue_time: float = 0.0
    first_token: float | None = None
    _last_piece: dict[int, float] = field(default_factory=dict)

    def note(self, update: Update) -> float | None:
        """Take an update that goes to the client.

        Returns:
            For all but the first piece of a stream's choice, the seconds since the piece before.
        """
        if update.finish_reason is not None:
            self.finish_reasons.append(update.finish_reason)
            self.queue_time = max(self.queue_time, update.queue_time)
        if not self.streamed or not update.token_ids:
            return None
        now = time.perf_counter()
        before = self._last_piece.get(update.choice)
        self._last_piece[update.choice] = now
        if self.first_token is None:
            self.first_token = now
        return None if before is None else now - before

    @property
    def unfinished(self) -> int:
        """Choices that have not ended."""
        return self.choices - len(self.finish_reasons)

    def attach(self, scope: Scope) -> None:
        """Let `record_of` find it."""
        scope[_KEY] = self


def record_of(request: Request) -> RequestRecord:
    """The record of a request."""
    record: RequestRecord = request.scope[_KEY]
    return record
