"""From tokens to text: the last station of a job, which finds its stop strings."""

from __future__ import annotations

from collections.abc import Iterable

from minisgl.core.request import TokenLogprobs
from minisgl.messages.replies import Accepted, Reply, Told, Update
from minisgl.messages.steps import Begun, Finished, Progress, Started, Token
from minisgl.tokenizer import TextStream, Tokenizer


class DetokenizerStage:
    """Turns what the scheduler has computed into what clients read. Keeps one state for each unfinished choice.

    Args:
        tokenizer: the model's.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[int, _Choice] = {}
        """By the engine's numbers."""

    def handle(self, progress: Progress) -> tuple[list[Reply], list[int]]:
        """What to tell the API process of a step, and the requests whose text has ended with a stop string.

        The scheduler has computed on until it hears of these: the tokens that it sends meanwhile are dropped.
        """
        replies: list[Reply] = []
        for begun in progress.begun:
            self._begin(begun)
            replies.append(Accepted(begun.job, begun.prompt_lens))
        replies += progress.rejected
        self._start(progress.started)
        stopped = self._take(progress.tokens)
        self._finish(progress.finished)
        replies += self._updates({*(token.uid for token in progress.tokens), *(end.uid for end in progress.finished)})
        replies += [self._count(told) for told in progress.told]
        return replies, stopped

    def _begin(self, begun: Begun) -> None:
        for index, uid in enumerate(begun.uids):
            text = TextStream(self._tokenizer, begun.stop, begun.min_tokens)
            self._choices[uid] = _Choice(begun.job, index, begun.streaming, text)

    def _start(self, started: Iterable[Started]) -> None:
        for start in started:
            if (choice := self._choices.get(start.uid)) is not None:
                choice.start(start.cached_tokens, start.queue_time)

    def _take(self, tokens: Iterable[Token]) -> list[int]:
        stopped: list[int] = []
        for token in tokens:
            choice = self._choices.get(token.uid)
            if choice is None or choice.ended:
                continue
            choice.take([token.token_id], [token.logprobs] if token.logprobs else [])
            if choice.ended:
                stopped.append(token.uid)
        return stopped

    def _finish(self, finished: Iterable[Finished]) -> None:
        for end in finished:
            choice = self._choices.get(end.uid)
            if choice is not None and not choice.ended:
                choice.take(end.token_ids, end.logprobs)
                choice.finish(end.reason, end.error)

    def _updates(self, uids: set[int]) -> list[Update]:
        """One a choice that has news to tell."""
        updates = []
        for uid in sorted(uids & self._choices.keys()):
            choice = self._choices[uid]
            if choice.ended:
                del self._choices[uid]
            if choice.ended or choice.streaming:
                updates.append(choice.take_update())
        return updates

    def _count(self, told: Told) -> Told:
        return Told(told.number, told.content, {**told.states, "detokenizer": len(self._choices)})


class _Choice:
    """An unfinished choice: its text so far, and what has not been told of it."""

    def __init__(self, job: int, index: int, streaming: bool, text: TextStream) -> None:
        self.streaming = streaming
        self._text = text
        self._update = Update(job, index)

    @property
    def ended(self) -> bool:
        return self._update.finish_reason is not None

    def start(self, cached_tokens: int, queue_time: float) -> None:
        """Take what is known once it has left the queue."""
        self._update.cached_tokens = cached_tokens
        self._update.queue_time = queue_time

    def take(self, token_ids: list[int], logprobs: list[TokenLogprobs]) -> None:
        """Take new tokens, which may end the choice."""
        update = self._update
        update.text += self._text.feed(token_ids)
        update.token_ids += token_ids
        update.logprobs += logprobs
        if self._text.stopped:
            update.finish_reason = "stop"

    def finish(self, reason: str, error: str | None) -> None:
        """Take the news that no more tokens will come. A stop string in the rest of the text counts all the same."""
        self._update.text += self._text.finish()
        self._update.finish_reason = "stop" if self._text.stopped else reason
        self._update.error = error

    def take_update(self) -> Update:
        """Everything since the last time."""
        told = self._update
        self._update = Update(told.job, told.choice)
        self.start(told.cached_tokens, told.queue_time)
        return told
