"""What the event loop and the engine say to each other. Plain data, so that a socket can carry it as well."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from minisgl.core.request import TokenLogprobs
from minisgl.core.sampling_params import SamplingParams
from minisgl.server.live.state import LiveState, Look


@dataclass(frozen=True, slots=True)
class Conversation:
    """A prompt to be written in the model's chat template.

    Args:
        messages: with ``role`` and ``content`` each.
        tools: functions that the model may call; None is not to be told of any.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


Prompt = str | Sequence[int] | Conversation
"""Text, token ids, or what is to be written in the model's chat template."""


@dataclass(frozen=True, slots=True)
class Submit:
    """Generate.

    Args:
        job: names the job in all that follows; never reused.
        prompts: text, token ids or a conversation each.
        params: of all prompts. Completion i of prompt p is the job's choice ``p * params.n + i``.
        streaming: whether updates are wanted while the generation runs, or a single one at its end.
        user: on whose behalf; the empty string where the client does not say.
    """

    job: int
    prompts: Sequence[Prompt]
    params: SamplingParams
    streaming: bool
    user: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """Forget a job: nobody waits for it any more."""

    job: int


@dataclass(frozen=True, slots=True)
class Count:
    """Say how busy the engine is; answered with `Told`."""

    job: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How busy the engine is, between two steps.

    Args:
        waiting, running: requests in the queue, and in the running table.
        pages: KV pages in all.
        free_pages: KV pages that hold nothing.
        cached_pages: KV pages that hold what no running request uses, for those that will have the same prefix.
    """

    waiting: int
    running: int
    pages: int
    free_pages: int
    cached_pages: int

    @property
    def used_pages(self) -> int:
        """KV pages that running requests hold."""
        return self.pages - self.free_pages - self.cached_pages


@dataclass(frozen=True, slots=True)
class Told:
    """The answer to `Count`."""

    job: int
    stats: EngineStats


@dataclass(frozen=True, slots=True)
class Accepted:
    """The whole job is in the engine's queue; ``prompt_lens`` has the tokens of each prompt."""

    job: int
    prompt_lens: list[int]


@dataclass(frozen=True, slots=True)
class Rejected:
    """Nothing of the job is in the engine. No further news of it will come."""

    job: int
    error: Exception


@dataclass(slots=True)
class Update:
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
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
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


Message = Submit | Abort | Count | Look
Reply = Accepted | Rejected | Update | Told | LiveState
