"""The messages between the processes of a server."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import msgspec

from minisgl.child_process import ChildOptions
from minisgl.config import EngineConfig
from minisgl.errors import Failure, InvalidRequest, short_repr
from minisgl.request import TokenLogprobs
from minisgl.sampling_params import SamplingParams


class Conversation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt to be written in the model's chat template.

    Args:
        messages: with ``role`` and ``content`` each.
        tools: functions that the model may call; None is not to be told of any.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None


class TokenIds(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt of token ids, as the bytes of an int32 array: see `pack`."""

    data: bytes


Prompt = str | TokenIds | Conversation


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate.

    Args:
        job: names the job in all that follows; never reused.
        prompts: text, token ids or a conversation each.
        params: the fields of `SamplingParams` that are not at their defaults, for all prompts. Completion i of prompt p
            is the job's choice ``p * n + i``.
        streaming: whether updates are wanted while the generation runs, or a single one at its end.
        user: on whose behalf; the empty string where the client does not say.
    """

    job: int
    prompts: list[Prompt]
    params: dict[str, Any]
    streaming: bool
    user: str = ""


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The same, with token ids for all prompts: int32 each."""

    job: int
    prompts: list[bytes]
    params: dict[str, Any]
    streaming: bool
    user: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Forget a job that was accepted: nobody waits for it any more. It may have ended meanwhile."""

    job: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Requests whose text has ended with a stop string. They may have ended meanwhile."""

    uids: list[int]


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask for the scheduler's state. The answer is a `StatsReply` of the same number.

    Args:
        number: never reused.
        topic: what to tell beside the number of states that each process holds.
    """

    number: int
    topic: str = ""


ToScheduler = Tokenized | Abort | Stop | StatsRequest


def submit(
    job: int,
    prompts: Sequence[str | Sequence[int] | Conversation],
    params: SamplingParams,
    streaming: bool,
    user: str,
) -> Submit:
    """A job as a message.

    Raises:
        InvalidRequest: a token id has more than 32 bits.
    """
    packed = [prompt if isinstance(prompt, (str, Conversation)) else TokenIds(pack(prompt)) for prompt in prompts]
    given = {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}
    return Submit(job, packed, given, streaming, user)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of an int32 array.

    Raises:
        InvalidRequest: an id has more than 32 bits.
    """
    try:
        return array("i", token_ids).tobytes()
    except OverflowError:
        bad = next(token_id for token_id in token_ids if not -(2**31) <= token_id < 2**31)
        raise InvalidRequest("prompt", f"token id {short_repr(bad)} is outside of every vocabulary") from None


def encode(message: Submit) -> bytes:
    """A job for a socket.

    Raises:
        InvalidRequest: a text is no valid Unicode, or a number has more than 64 bits; names the field.
    """
    try:
        return msgspec.msgpack.encode(message)
    except (UnicodeEncodeError, OverflowError):
        parts = {"prompt": message.prompts, "user": message.user, **message.params}
        for field, value in parts.items():
            _check_encodable(field, value)
        raise


def _check_encodable(field: str, value: object) -> None:
    try:
        msgspec.msgpack.encode(value)
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"must be valid Unicode, but has a lone surrogate ({error})") from error
    except OverflowError as error:
        raise InvalidRequest(field, "has a number of more than 64 bits") from error


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


STATS = "stats"
"""The topic under which an engine is asked for its `EngineStats`."""


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
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


class TokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """What a tokenizer is told.

    Args:
        model: directory of the checkpoint.
        limit: most tokens of a request, as far as it can be told before the engine is there.
    """

    model: str
    limit: int | None


class DetokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """What the detokenizer is told.

    Args:
        model: directory of the checkpoint.
    """

    model: str


class SchedulerOptions(ChildOptions, frozen=True, kw_only=True):
    """What the scheduler is told.

    Args:
        engine: all options of the engine.
        trace: file for a record of the engine's last steps, if one is wanted.
    """

    engine: EngineConfig
    trace: str | None = None
