"""``text_completion``, whole or in chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from minisgl.core.request import TokenLogprobs
from minisgl.messages import Update
from minisgl.server.formats import LEAST_LOGPROB, Json, OpenAIFormat
from minisgl.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that comes back before its continuation.

    Args:
        text: of the prompt.
        token_ids: of the prompt; empty if no log-probabilities were asked for.
        logprobs: of all tokens but the first, which nothing comes before.
    """

    text: str
    token_ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprobs] = ()


class CompletionFormat(OpenAIFormat):
    """Continuations of text.

    Args:
        model, tokenizer, logprobs, show_usage: see `OpenAIFormat`.
        echoes: what comes before the text of each choice; empty for nothing.
    """

    whole_object = chunk_object = "text_completion"
    id_prefix = "cmpl"

    def __init__(
        self, model: str, tokenizer: Tokenizer, logprobs: bool, show_usage: bool, echoes: Sequence[Echo]
    ) -> None:
        super().__init__(model, tokenizer, logprobs, show_usage)
        self._echoes = echoes
        self._offsets: Counter[int] = Counter()
        """Characters so far, by choice."""

    def opening(self, num_choices: int) -> list[Json]:
        """The echoes."""
        return [
            self._chunk(self._body(index, echo.text, self._echoed(index), None))
            for index, echo in enumerate(self._echoes)
        ]

    def chunk(self, update: Update) -> Json | None:
        """New text."""
        if not update.text and not update.finish_reason and not (self._wants_logprobs and update.logprobs):
            return None
        return self._chunk(self._body(update.choice, update.text, self._logprobs(update), update.finish_reason))

    def _choice(self, update: Update) -> Json:
        if not self._echoes:
            return self._body(update.choice, update.text, self._logprobs(update), update.finish_reason)
        echoed, continued = self._echoed(update.choice), self._logprobs(update)
        if echoed is not None and continued is not None:
            echoed = {name: echoed[name] + continued[name] for name in echoed}
        return self._body(update.choice, self._echoes[update.choice].text + update.text, echoed, update.finish_reason)

    def _body(self, choice: int, text: str, logprobs: Json | None, finish_reason: str | None) -> Json:
        return {"index": choice, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}

    def _echoed(self, choice: int) -> Json | None:
        if not self._wants_logprobs:
            return None
        echo = self._echoes[choice]
        first = self._text(echo.token_ids[0])
        self._offsets[choice] = len(first)
        rest = self._positions(choice, echo.logprobs)
        start = {"tokens": [first], "token_logprobs": [None], "top_logprobs": [None], "text_offset": [0]}
        return {name: start[name] + rest[name] for name in rest}

    def _logprobs(self, update: Update) -> Json | None:
        return self._positions(update.choice, update.logprobs) if self._wants_logprobs else None

    def _positions(self, choice: int, entries: Sequence[TokenLogprobs]) -> Json:
        tokens, offsets, top = [], [], []
        for entry in entries:
            tokens.append(self._text(entry.token_id))
            offsets.append(self._offsets[choice])
            self._offsets[choice] += len(tokens[-1])
            likely: dict[str, float] = {}
            for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
                likely.setdefault(self._text(token_id), max(logprob, LEAST_LOGPROB))
            top.append(likely)
        values = [max(entry.logprob, LEAST_LOGPROB) for entry in entries]
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": top, "text_offset": offsets}
