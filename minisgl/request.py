"""One request: its state, its lengths, its output, and what may constrain its tokens."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from minisgl.sampling_params import SamplingParams

Int32Array = npt.NDArray[np.int32]


class RequestState(enum.Enum):
    """Where a request is. WAITING → PREFILL → DECODE → FINISHED; PREEMPTED goes back to the head of the queue."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODE = "decode"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(enum.StrEnum):
    """Why a request ended. The first two are what the OpenAI API calls ``finish_reason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities of one generated position, in nats, of the model's own distribution (before penalties)."""

    token_id: int  # the sampled token
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability) of the likeliest tokens, best first


@dataclass(slots=True)
class RequestTimes:
    """When a request reached each station of its life, in seconds of ``time.perf_counter``; 0.0 is not yet."""

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to generate; what a decode step touches for every request is in `RunningTable` instead.

    A prompt with ``n`` completions is n requests.
    """

    uid: int  # unique in its engine, never reused; also the order of arrival
    prompt: Int32Array  # [prompt_len] token ids
    params: SamplingParams  # n is ignored here
    max_len: int  # most tokens the sequence may have, prompt included
    stop_ids: tuple[int, ...] = ()  # tokens that end the request: end-of-sequence ids (unless ignored), stop_token_ids
    seed: int = 0
    watched: bool = False  # report every token as it comes: for streaming, stop strings and log-probabilities
    deadline: float | None = None  # time.perf_counter value at which the request ends with an error; None is never
    user: str = ""  # whom its client names, for policies that are fair to users; empty if unknown
    group: int | None = None  # of requests that came together and take turns with others; None is one of its own
    client: str = ""  # address that it came from, of which each has its turn; empty without a server
    constraint: TokenConstraint | None = None  # decides which tokens may come next; None allows all

    state: RequestState = RequestState.WAITING
    slot: int = -1  # row in the running table; −1 while the request is not running
    output: list[int] = field(default_factory=list)  # generated ids, written when it leaves the running table
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None  # what went wrong, if finish_reason is "error"
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at the first admission
    preemptions: int = 0
    accepted_drafts: int = 0  # tokens of the output that a drafter had guessed
    rejected_drafts: int = 0  # guesses that were wrong, or behind a wrong one
    bypassed: int = 0  # how often a later request was admitted before this one
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    def tokens(self) -> Int32Array:
        """Prompt and generated tokens, int32[prompt_len + output_len]. For a request that is not running."""
        if not self.output:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])


class TokenConstraint(Protocol):
    """A state machine on the host that follows one request's output token by token, such as a grammar."""

    @property
    def finished(self) -> bool:
        """True once the output is complete and only its end may follow."""
        ...

    @property
    def error(self) -> str | None:
        """Why the output cannot go on: it has a token that was not allowed, or following it takes too much."""
        ...

    def accept(self, token: int) -> None:
        """Take the next token of the output, including one that ends the request."""
        ...

    def fork(self) -> TokenConstraint:
        """Return a copy in the same state, which may take tokens that turn out not to be output."""
        ...


# Makes the masks of a step, int32[C, words], for C constraints in their present states. Bit t % 32 (the lowest is 0) of
# word t // 32 is set if token t may come next. Bits beyond the vocabulary mean nothing.
MaskMaker = Callable[[Sequence[TokenConstraint]], Int32Array]
