"""A request as the caller of an `LLM` sees it: tokens come in, text goes out."""

from __future__ import annotations

from collections import deque

from minisgl.core.request import Request, TokenLogprobs
from minisgl.outputs import Completion, CompletionAssembler, Delta, Metrics
from minisgl.tokenizer import Tokenizer


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
