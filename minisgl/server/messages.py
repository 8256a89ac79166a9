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

# -- API process → tokenizer → scheduler -----------------------------------------------------------------------


class Conversation(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt to be written in the model's chat template: messages with ``role`` and ``content`` each, and tools."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None = None  # functions that the model may call
    variables: Mapping[str, Any] | None = None  # what else the template can read, by name


class TokenIds(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A prompt of token ids, as the bytes of an int32 array: see `pack`."""

    data: bytes


JobPrompt = str | Sequence[int] | Conversation  # as the server's code passes it
PackedPrompt = str | TokenIds | Conversation  # the same in a message


class Submit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Generate. Completion i of prompt p is the job's choice ``p * n + i``."""

    job: int  # names the job in all later messages; never reused
    prompts: list[PackedPrompt]
    params: dict[str, Any]  # the fields of `SamplingParams` that are not at their defaults, for all prompts
    streaming: bool  # send updates while the generation runs, or a single one at its end
    user: str = ""  # empty where the client does not say
    request_id: str = ""  # of the HTTP request, for logs; empty for the server's own jobs
    client: str = ""  # address that the request came from; jobs of different clients take turns


class Tokenized(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A `Submit` with token ids for all prompts: the bytes of an int32 array each."""

    job: int
    prompts: list[bytes]
    params: dict[str, Any]
    streaming: bool
    user: str = ""
    request_id: str = ""
    client: str = ""


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End an accepted job early, because its client has left. The job may have ended meanwhile."""

    job: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """End requests whose text has reached a stop string. They may have ended meanwhile."""

    uids: list[int]


class StatsRequest(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask about the engine's state. The answer is a `StatsReply` with the same number."""

    number: int  # never reused
    topic: str = ""  # what to report beside the number of jobs and choices that each process keeps


ToScheduler = Tokenized | Abort | Stop | StatsRequest


def submit(
    job: int,
    prompts: Sequence[JobPrompt],
    params: SamplingParams,
    streaming: bool,
    user: str,
    request_id: str = "",
    client: str = "",
) -> Submit:
    """Make the message for a job. Raises `InvalidRequest` if a token id has more than 32 bits."""
    packed = [prompt if isinstance(prompt, (str, Conversation)) else TokenIds(pack(prompt)) for prompt in prompts]
    given = {field.name: value for field in fields(params) if (value := getattr(params, field.name)) != field.default}
    return Submit(job, packed, given, streaming, user, request_id, client)


def pack(token_ids: Sequence[int]) -> bytes:
    """Token ids as the bytes of an int32 array. Raises `InvalidRequest` if an id has more than 32 bits."""
    try:
        return array("i", token_ids).tobytes()
    except OverflowError:
        bad = next(token_id for token_id in token_ids if not -(2**31) <= token_id < 2**31)
        raise InvalidRequest("prompt", f"token id {short_repr(bad)} is outside of every vocabulary") from None


def encode(message: Submit) -> bytes:
    """Encode a job for a socket; `InvalidRequest` names a field with invalid Unicode or a number over 64 bits."""
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


# -- scheduler → detokenizer -----------------------------------------------------------------------------------


DraftCounts = tuple[int, int]
"""Drafts of a request so far: accepted, and rejected."""


class RequestAccepted(msgspec.Struct, frozen=True, array_like=True):
    """All requests of a job are in the scheduler's queue."""

    job: int
    uids: list[int]  # the engine's number of each choice, in order
    prompt_lens: list[int]  # tokens of each prompt
    streaming: bool
    stop: list[str]  # strings that end the text
    min_tokens: int  # tokens that must come before a stop string counts
    request_id: str = ""


class Started(msgspec.Struct, frozen=True, array_like=True):
    """A request has left the queue: sent with its first token, or with its end."""

    uid: int
    cached_tokens: int  # prompt tokens that the prefix cache had
    queue_time: float  # seconds of waiting


class Token(msgspec.Struct, frozen=True, array_like=True):
    """One new token of a request whose tokens are sent step by step."""

    uid: int
    token_id: int
    logprobs: TokenLogprobs | None = None
    drafts: DraftCounts = (0, 0)


class Finished(msgspec.Struct, frozen=True, array_like=True):
    """The end of a request, with its tokens unless they were sent step by step."""

    uid: int
    reason: str  # a `FinishReason`
    error: str | None = None  # what went wrong if the reason is "error"
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    drafts: DraftCounts = (0, 0)


class Progress(msgspec.Struct, array_like=True):
    """Everything that one step brought, in the order in which it must be handled."""

    accepted: list[RequestAccepted] = []
    rejected: list[Rejected] = []
    started: list[Started] = []
    tokens: list[Token] = []
    finished: list[Finished] = []
    stats: list[StatsReply] = []

    def __bool__(self) -> bool:
        return bool(self.accepted or self.rejected or self.started or self.tokens or self.finished or self.stats)


# -- to the API process ----------------------------------------------------------------------------------------


class Accepted(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The whole job is in the engine's queue; ``prompt_lens`` has the number of tokens of each prompt."""

    job: int
    prompt_lens: list[int]


class Rejected(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Nothing of the job is in the engine, and no other message about it follows."""

    job: int
    failure: Failure


class Update(msgspec.Struct, array_like=True, tag=True):
    """New text and tokens of one choice of a job. The last update has a ``finish_reason`` and the two numbers."""

    job: int
    choice: int
    text: str = ""
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []
    finish_reason: str | None = None
    error: str | None = None  # what went wrong if the reason is "error"
    cached_tokens: int = 0  # prompt tokens that the prefix cache had
    queue_time: float = 0.0  # seconds from the arrival in the queue to the first step
    drafts: DraftCounts = (0, 0)

    def merge(self, later: Update) -> None:
        """Append a later update of the same choice."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason = later.finish_reason
        self.error = later.error
        self.cached_tokens = later.cached_tokens
        self.queue_time = later.queue_time
        self.drafts = later.drafts


class StatsReply(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to a `StatsRequest`. It passes through every process that keeps jobs or choices."""

    number: int
    content: bytes  # encoded as the topic has it
    states: dict[str, int]  # jobs and choices that each process keeps, by its name


Reply = Accepted | Rejected | Update | StatsReply

STATS = "stats"  # the topic whose answer is an `EngineStats`
FLUSH = "flush"  # the topic that empties the prefix cache of what no request uses, and answers how many pages that was


class EngineStats(msgspec.Struct, frozen=True, array_like=True):
    """How busy the engine is, between two steps: requests, pages of the KV cache, and drafts."""

    waiting: int
    running: int
    pages: int
    free_pages: int
    cached_pages: int  # kept for later requests with the same prefix; no running request uses them
    store: dict[str, int] = {}  # what a page store has done with pages, by event: see `PageOffloader.counts`
    drafted: int = 0  # tokens that a drafter guessed and a step verified, since the engine started
    accepted: int = 0  # of those, tokens that became output
    verifications: int = 0  # rows of steps that had drafts
    paused: int = 0  # running requests that get no drafts now, since they did not pay

    @property
    def used_pages(self) -> int:
        """KV pages that running requests hold."""
        return self.pages - self.free_pages - self.cached_pages


# -- options of the processes ----------------------------------------------------------------------------------


class TokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """Options of a tokenizer process."""

    model: str  # directory of the checkpoint
    limit: int | None  # most tokens of a request, as far as it is known before the engine has started
    allow_control_tokens: bool = False


class DetokenizerOptions(ChildOptions, frozen=True, kw_only=True):
    """Options of the detokenizer process."""

    model: str  # directory of the checkpoint


class SchedulerOptions(ChildOptions, frozen=True, kw_only=True):
    """Options of the scheduler process, which runs the engine."""

    engine: EngineConfig
    trace: str | None = None  # file for a trace of the engine's last steps
    kv_events: str | None = None  # this and the next two: see `ServerConfig`
    kv_events_replay: str | None = None
    kv_events_topic: str = ""
