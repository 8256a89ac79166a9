"""A request as its caller sees it: tokens come in, text goes out."""

from __future__ import annotations

from collections import deque

from minisgl.core.request import FinishReason, Request, TokenLogprobs
from minisgl.outputs import Completion, Delta, Metrics
from minisgl.tokenizer import TextStream, Tokenizer


class Generation:
    """One of the ``n`` continuations of a prompt, from submission to the end.

    Text is only decoded as it comes where somebody reads it as it comes, or where it can end the request.

    Args:
        request: what the engine computes.
        tokenizer: the model's.
        index: which of the ``n``.
        streaming: whether `deltas` is read.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, index: int, streaming: bool) -> None:
        self.request = request
        self.index = index
        self.finished = False
        self.deltas: deque[Delta] = deque()
        """Pieces that nobody has taken yet, if streaming."""
        self._tokenizer = tokenizer
        self._streaming = streaming
        self._text = ""
        stop = tuple(request.params.stop)
        self._stream = TextStream(tokenizer, stop, request.params.min_tokens) if streaming or stop else None

    def on_token(self, token_id: int, logprobs: TokenLogprobs | None) -> bool:
        """Take one new token. Returns True if its text completes a stop string: the request must end now."""
        if self._stream is None:
            return False
        text = self._stream.feed([token_id])
        self._text += text
        if self._streaming:
            self.deltas.append(Delta(self.index, text, [token_id], logprobs=[logprobs] if logprobs else None))
        return self._stream.stopped

    def on_finish(self) -> None:
        """Take the news that the request has ended, after its last token."""
        self.finished = True
        rest = "" if self._stream is None else self._stream.finish()
        self._text += rest
        if self._streaming:
            self.deltas.append(Delta(self.index, rest, [], self.finish_reason.value, self.request.error))

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended. A stop string counts even if the token that completes it is the last one allowed."""
        stopped = self._stream is not None and self._stream.stopped
        reason = FinishReason.STOP if stopped else self.request.finish_reason
        assert reason is not None, "the request is not finished"
        return reason

    def completion(self) -> Completion:
        """The whole answer of a finished request."""
        request = self.request
        text = self._text
        if self._stream is None:
            whole = TextStream(self._tokenizer)
            text = whole.feed(request.output) + whole.finish()
        return Completion(
            token_ids=request.output,
            text=text,
            finish_reason=self.finish_reason.value,
            error=request.error,
            cached_tokens=request.cached_tokens,
            logprobs=request.logprobs if request.params.logprobs is not None else None,
            metrics=Metrics.of(request),
        )
