"""Messages from the scheduler to the detokenizer: one a step, with token ids and without text."""

from __future__ import annotations

import msgspec

from minisgl.core.request import TokenLogprobs
from minisgl.messages.replies import Rejected, StatsReply


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True):
    """A job whose requests are all in the scheduler's queue.

    Args:
        job: its number.
        uids: the engine's numbers of its choices, in their order.
        prompt_lens: tokens of each prompt.
        streaming: whether updates are wanted before the end.
        stop: strings that end the text.
        min_tokens: how many tokens come before a stop string counts.
    """

    job: int
    uids: list[int]
    prompt_lens: list[int]
    streaming: bool
    stop: list[str]
    min_tokens: int


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request that has left the queue: told with its first token, or with its end.

    Args:
        uid: its number.
        cached_tokens: prompt tokens that the prefix cache had.
        queue_time: seconds that it has waited.
    """

    uid: int
    cached_tokens: int
    queue_time: float


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of a request that is followed step by step."""

    uid: int
    token_id: int
    logprobs: TokenLogprobs | None = None


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """A request that has ended. Nothing more of it will come.

    Args:
        uid: its number.
        reason: a `FinishReason`.
        error: what went wrong if the reason is ``"error"``.
        token_ids: its tokens, if they have not been sent step by step.
        logprobs: of these tokens, if they were asked for.
    """

    uid: int
    reason: str
    error: str | None = None
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []


class Progress(msgspec.Struct, array_like=True):
    """Everything that one step brought, in the order in which it must be told."""

    accepted: list[RequestAccepted] = []
    rejected: list[Rejected] = []
    started: list[Started] = []
    tokens: list[Token] = []
    finished: list[Finished] = []
    stats: list[StatsReply] = []

    def __bool__(self) -> bool:
        return bool(self.accepted or self.rejected or self.started or self.tokens or self.finished or self.stats)
