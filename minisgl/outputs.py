"""What a caller gets back."""

from __future__ import annotations

from dataclasses import dataclass

from minisgl.core.request import Int32Array, Request, TokenLogprobs


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
