"""Messages to the API process: what became of its jobs."""

from __future__ import annotations

import msgspec

from minisgl.core.request import TokenLogprobs
from minisgl.errors import Failure


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The whole job is in the engine's queue; ``prompt_lens`` has the tokens of each prompt."""

    job: int
    prompt_lens: list[int]


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing of the job is in the engine. No further news of it will come."""

    job: int
    failure: Failure


class Update(msgspec.Struct, array_like=True, tag=True):
    """What is new about one choice of a job.

    Args:
        job, choice: which.
        text: new text.
        token_ids: new tokens.
        logprobs: of the new tokens, if they were asked for.
        finish_reason: set in a choice's last update.
        error: what went wrong if the reason is ``"error"``.
        cached_tokens: prompt tokens that the prefix cache had; known in the last update.
        queue_time: seconds from the arrival in the queue to the first step; known in the last update.
    """

    job: int
    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    error: str | None = None
    cached_tokens: int = 0
    queue_time: float = 0.0

    def merge(self, later: Update) -> None:
        """Append a later update of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.cached_tokens = later.cached_tokens
        self.queue_time = later.queue_time


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a `StatsRequest`, which passes every process that holds states.

    Args:
        number: of the request.
        content: what there is to tell on its topic, encoded as the topic has it.
        states: jobs and choices that are being kept, by process.
    """

    number: int
    content: bytes
    states: dict[str, int]


Reply = Accepted | Rejected | Update | StatsReply
