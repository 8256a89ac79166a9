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
    """Log-probabilities of one generated position, in nats, of the model's own distribution (before penalties).

    Args:
        token_id: the sampled token.
        logprob: its log-probability.
        top: (token id, log-probability) of the likeliest tokens, best first.
    """

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(slots=True)
class RequestTimes:
    """When the stations of a request's life were passed, in seconds of ``time.perf_counter``; 0.0 is not yet."""

    arrived: float = 0.0
    admitted: float = 0.0
    first_token: float = 0.0
    finished: float = 0.0


@dataclass(eq=False, slots=True)
class Request:
    """One sequence to be generated. A prompt with ``n`` completions is n of these.

    Everything that a decode step touches for *every* request lives in `RunningTable`, as one array a field; this
    object holds what is read once in a while.

    Args:
        uid: unique in its engine, never reused; also the order of arrival.
        prompt: token ids, int32[prompt_len].
        params: sampling parameters (``n`` is ignored here).
        max_len: most tokens the sequence may have, prompt included.
        stop_ids: tokens that end the request: end-of-sequence ids (unless ignored) and ``stop_token_ids``.
        seed: sampling seed, always set.
        watched: True if somebody wants to see each token as it comes (streaming, stop strings, log-probabilities).
        deadline: ``time.perf_counter`` value after which the request is ended with an error; None is never.
        user: who asked, for policies that are fair to users; the empty string is nobody in particular.
        constraint: decides which tokens it may generate, and has followed all that the host has seen; None is any.
    """

    uid: int
    prompt: Int32Array
    params: SamplingParams
    max_len: int
    stop_ids: tuple[int, ...] = ()
    seed: int = 0
    watched: bool = False
    deadline: float | None = None
    user: str = ""
    constraint: TokenConstraint | None = None

    state: RequestState = RequestState.WAITING
    slot: int = -1
    """Row in the running table; −1 while the request is not running."""
    output: list[int] = field(default_factory=list)
    """Generated token ids. Complete once the request has left the running table, see `RunningTable.release`."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    """Why, if ``finish_reason`` is ``error``."""
    cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    preemptions: int = 0
    bypassed: int = 0
    """How often a later request was admitted before this one."""
    times: RequestTimes = field(default_factory=RequestTimes)

    @property
    def prompt_len(self) -> int:
        return len(self.prompt)

    def tokens(self) -> Int32Array:
        """Prompt and generated tokens, int32[prompt_len + output_len]. For a request that is not running."""
        return np.concatenate([self.prompt, np.asarray(self.output, dtype=np.int32)])


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
