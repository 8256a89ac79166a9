"""What a caller gets back: the whole answer to a prompt, or its pieces as they come."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.detokenizer import TextStream
from minisgl.request import FinishReason, Int32Array, Request, TokenLogprobs
from minisgl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. Properties such as ``text`` are those of the first of ``n`` completions."""

    prompt: Int32Array  # [len] the prompt as the model saw it
    completions: list[Completion]

    @property
    def prompt_token_ids(self) -> list[int]:
        """The prompt as a list."""
        ids: list[int] = self.prompt.tolist()
        return ids

    @property
    def text(self) -> str:
        return self.completions[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.completions[0].token_ids

    @property
    def finish_reason(self) -> str:
        return self.completions[0].finish_reason

    @property
    def error(self) -> str | None:
        return self.completions[0].error

    @property
    def cached_tokens(self) -> int:
        return self.completions[0].cached_tokens

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.completions[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.completions[0].metrics


@dataclass(frozen=True, slots=True)
class Completion:
    """One generated continuation of a prompt."""

    token_ids: list[int]  # generated tokens, including the one that ended the request
    text: str  # without special tokens, cut before a stop string; empty if the model has no tokenizer
    finish_reason: str  # "stop", "length", "abort" or "error"
    error: str | None  # what went wrong, if the reason is "error"
    cached_tokens: int  # prompt tokens that came from the prefix cache instead of being computed
    logprobs: list[TokenLogprobs] | None  # one entry a token if they were asked for
    metrics: RequestMetrics


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Where a request's time went, in seconds."""

    queue_time: float  # from arrival to the first step that the request ran in
    ttft: float  # time to first token, from arrival
    tpot: float  # time per output token: the mean after the first; 0 for a single token
    latency: float  # from arrival to the last token
    preemptions: int  # how often the request was preempted, and recomputed later

    @classmethod
    def of(cls, request: Request) -> RequestMetrics:
        """Metrics of a finished request. Times of stations that it never reached are 0."""
        times, count = request.times, len(request.output)
        decode_time = times.finished - times.first_token
        return cls(
            queue_time=max(0.0, times.admitted - times.arrived),
            ttft=max(0.0, times.first_token - times.arrived),
            tpot=decode_time / (count - 1) if count > 1 else 0.0,
            latency=times.finished - times.arrived,
            preemptions=request.preemptions,
        )


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a streamed completion."""

    index: int  # which of the n completions
    text: str  # new text; may be empty, as a character can take several tokens
    token_ids: list[int]  # new tokens
    finish_reason: str | None = None  # set in the last delta of a completion
    error: str | None = None  # what went wrong, if the reason is "error"
    logprobs: list[TokenLogprobs] | None = None  # of the new tokens, if they were asked for


class CompletionAssembler:
    """Puts completion ``index`` of ``n`` together: tokens go in; text comes out, cut before a stop string.

    With ``stop`` strings, add one token at a time; they count after ``min_tokens`` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, index: int, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.index = index
        self.finish_reason: str | None = None  # set once the completion has ended; nothing may be added then
        self._error: str | None = None
        self._stream = TextStream(tokenizer, stop, min_tokens)
        self._text = ""
        self._token_ids: list[int] = []
        self._logprobs: list[TokenLogprobs] = []

    @property
    def ended(self) -> bool:
        """Whether a stop string, or `finish`, has ended the completion."""
        return self.finish_reason is not None

    def add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> None:
        """Take new tokens, which may end the completion with a stop string."""
        self._text += self._stream.feed(token_ids)
        self._token_ids += token_ids
        self._logprobs += logprobs
        if self._stream.stopped:
            self.finish_reason = FinishReason.STOP.value

    def finish(self, reason: str, error: str | None = None) -> None:
        """End the completion for ``reason``, unless the text still held back completes a stop string."""
        self._text += self._stream.finish()
        self.finish_reason = FinishReason.STOP.value if self._stream.stopped else reason
        self._error = error

    def take(self) -> Delta:
        """Return everything that is new since the last call."""
        delta = Delta(self.index, self._text, self._token_ids, self.finish_reason, self._error, self._logprobs or None)
        self._text, self._token_ids, self._logprobs = "", [], []
        return delta
