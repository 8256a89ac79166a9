"""What a caller gets back: the whole answer of a request, or its pieces as they come."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.detokenizer import TextStream
from minisgl.request import FinishReason, Int32Array, Request, TokenLogprobs
from minisgl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Metrics:
    """Where a request's time went, in seconds.

    Args:
        queue_time: from arrival to the first step it ran in.
        ttft: from arrival to the first token (time to first token).
        tpot: mean time a token after the first (time per output token); 0 for a single token.
        latency: from arrival to the last token.
        preemptions: how often it was taken off and recomputed.
    """

    queue_time: float
    ttft: float
    tpot: float
    latency: float
    preemptions: int

    @classmethod
    def of(cls, request: Request) -> Metrics:
        """Metrics of a finished request; times of stations that it never reached are 0."""
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
class Completion:
    """One generated continuation.

    Args:
        token_ids: generated tokens, the one that ended the request included.
        text: their text: no special tokens, cut before a stop string; empty if the model has no tokenizer.
        finish_reason: ``"stop"``, ``"length"``, ``"abort"`` or ``"error"``.
        error: what went wrong if the reason is ``"error"``.
        cached_tokens: prompt tokens that were not computed, because the prefix cache had them.
        logprobs: one entry a token if they were asked for, else None.
        metrics: times.
    """

    token_ids: list[int]
    text: str
    finish_reason: str
    error: str | None
    cached_tokens: int
    logprobs: list[TokenLogprobs] | None
    metrics: Metrics


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """The answer to one prompt. Its short-cuts are those of the first of ``n`` completions.

    Args:
        prompt: [len] int32 the prompt as the model saw it.
        completions: ``n`` of them.
    """

    prompt: Int32Array
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
    def metrics(self) -> Metrics:
        return self.completions[0].metrics


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of a stream.

    Args:
        index: which of the ``n`` completions.
        text: new text; may be empty, as a character can take several tokens.
        token_ids: new tokens.
        finish_reason: set in the last delta of a completion, else None.
        error: what went wrong if the reason is ``"error"``.
        logprobs: of the new tokens if they were asked for, else None.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    error: str | None = None
    logprobs: list[TokenLogprobs] | None = None


class CompletionAssembler:
    """Puts one completion together: tokens go in, text comes out, detokenized and cut before a stop string.

    Args:
        tokenizer: the model's.
        index: which of the ``n`` completions.
        stop: strings that end the text. With any, give one token at a time.
        min_tokens: how many tokens come before a stop string counts.
    """

    def __init__(self, tokenizer: Tokenizer, index: int, stop: Sequence[str] = (), min_tokens: int = 0) -> None:
        self.index = index
        self.finish_reason: str | None = None
        """Set once the completion has ended; nothing may be added then."""
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
        """Take the news that no more tokens will come. A stop string in the rest of the text counts all the same."""
        self._text += self._stream.finish()
        self.finish_reason = FinishReason.STOP.value if self._stream.stopped else reason
        self._error = error

    def take(self) -> Delta:
        """Everything that is new since the last time."""
        delta = Delta(self.index, self._text, self._token_ids, self.finish_reason, self._error, self._logprobs or None)
        self._text, self._token_ids, self._logprobs = "", [], []
        return delta


class Generation:
    """One of the ``n`` continuations of a prompt, from submission to the end.

    Text is only decoded as it comes where it is read as it comes, or where it can end the request.

    Args:
        request: what the engine computes.
        tokenizer: the model's.
        index: which of the ``n``.
        streaming: whether `deltas` is read.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, index: int, streaming: bool) -> None:
        self.request = request
        self.finished = False
        self.deltas: deque[Delta] = deque()
        """Pieces that are not taken yet, if streaming."""
        self._streaming = streaming
        stop = tuple(request.params.stop)
        self._incremental = streaming or bool(stop)
        self._assembler = CompletionAssembler(tokenizer, index, stop, request.params.min_tokens)
        self._text = ""

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take one new token. Returns True if its text completes a stop string: the request must end now."""
        if not self._incremental:
            return False
        self._assembler.add([token_id], [logprobs] if logprobs else [])
        self._take()
        return self._assembler.ended

    def on_finish(self) -> None:
        """Take the news that the request has ended, after its last token."""
        self.finished = True
        if self._incremental and not self._assembler.ended:
            self._end()

    def completion(self) -> Completion:
        """The whole answer of a finished request."""
        request = self.request
        if not self._assembler.ended:
            self._assembler.add(request.output)
            self._end()
        assert self._assembler.finish_reason is not None
        return Completion(
            token_ids=request.output,
            text=self._text,
            finish_reason=self._assembler.finish_reason,
            error=request.error,
            cached_tokens=request.cached_tokens,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            metrics=Metrics.of(request),
        )

    def _end(self) -> None:
        assert self.request.finish_reason is not None, "the request is not finished"
        self._assembler.finish(self.request.finish_reason.value, self.request.error)
        self._take()

    def _take(self) -> None:
        delta = self._assembler.take()
        self._text += delta.text
        if self._streaming:
            self.deltas.append(delta)
