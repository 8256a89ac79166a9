"""The process that turns tokens into text: ``python -m minisgl.server.detokenizer_worker``."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import zmq

from minisgl.child_process import Ready, child_process
from minisgl.logs import log_request
from minisgl.outputs import CompletionAssembler
from minisgl.server.messages import (
    Accepted,
    DetokenizerOptions,
    DraftCounts,
    Finished,
    Progress,
    Reply,
    RequestAccepted,
    Started,
    StatsReply,
    Stop,
    Token,
    Update,
)
from minisgl.server.sockets import STEPS, UNBOUNDED, Receiver, Sender, address
from minisgl.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Choice:
    job: int
    streaming: bool
    assembler: CompletionAssembler
    cached_tokens: int = 0  # these two are known once it has left the queue
    queue_time: float = 0.0
    drafts: DraftCounts = (0, 0)


class DetokenizerStage:
    """Turns the scheduler's tokens into text for clients. Keeps one state for each unfinished choice."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._choices: dict[int, _Choice] = {}  # by uid

    def handle(self, progress: Progress) -> tuple[list[Reply], list[int]]:
        """Process one step: return the replies to the API process, and the uids that have reached a stop string."""
        replies: list[Reply] = []
        for accepted in progress.accepted:
            self._begin(accepted)
            replies.append(Accepted(accepted.job, accepted.prompt_lens))
        replies += progress.rejected
        self._start(progress.started)
        stopped = self._take(progress.tokens)
        self._finish(progress.finished)
        replies += self._updates({*(token.uid for token in progress.tokens), *(end.uid for end in progress.finished)})
        replies += [self._count(reply) for reply in progress.stats]
        return replies, stopped

    def _begin(self, accepted: RequestAccepted) -> None:
        for index, uid in enumerate(accepted.uids):
            assembler = CompletionAssembler(self._tokenizer, index, accepted.stop, accepted.min_tokens)
            self._choices[uid] = _Choice(accepted.job, accepted.streaming, assembler)

    def _start(self, started: Iterable[Started]) -> None:
        for start in started:
            if (choice := self._choices.get(start.uid)) is not None:
                choice.cached_tokens, choice.queue_time = start.cached_tokens, start.queue_time

    def _take(self, tokens: Iterable[Token]) -> list[int]:
        stopped: list[int] = []
        for token in tokens:
            choice = self._choices.get(token.uid)
            if choice is None or choice.assembler.ended:
                continue
            choice.drafts = token.drafts
            choice.assembler.add([token.token_id], [token.logprobs] if token.logprobs else [])
            if choice.assembler.ended:
                stopped.append(token.uid)
        return stopped

    def _finish(self, finished: Iterable[Finished]) -> None:
        for end in finished:
            choice = self._choices.get(end.uid)
            if choice is not None and not choice.assembler.ended:
                choice.drafts = end.drafts
                choice.assembler.add(end.token_ids, end.logprobs)
                choice.assembler.finish(end.reason, end.error)

    def _updates(self, uids: set[int]) -> list[Update]:
        """One for each choice that has something new for its client."""
        updates = []
        for uid in sorted(uids & self._choices.keys()):
            choice = self._choices[uid]
            if choice.assembler.ended:
                del self._choices[uid]
            if choice.assembler.ended or choice.streaming:
                updates.append(_update(choice))
        return updates

    def _count(self, reply: StatsReply) -> StatsReply:
        return StatsReply(reply.number, reply.content, {**reply.states, "detokenizer": len(self._choices)})


def _update(choice: _Choice) -> Update:
    delta = choice.assembler.take()
    return Update(
        job=choice.job,
        choice=delta.index,
        text=delta.text,
        token_ids=delta.token_ids,
        logprobs=delta.logprobs or [],
        finish_reason=delta.finish_reason,
        error=delta.error,
        cached_tokens=choice.cached_tokens,
        queue_time=choice.queue_time,
        drafts=choice.drafts,
    )


def main() -> None:
    """Detokenize until the parent ends this process."""
    with child_process(DetokenizerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[Progress](context, address(directory, options.name), Progress, STEPS)
        scheduler = Sender(context, address(directory, "scheduler"), UNBOUNDED)
        api = Sender(context, address(directory, "api"), STEPS)
        stage = DetokenizerStage(Tokenizer(Path(options.model)))
        report(Ready())
        while True:
            progress = inbox.receive()
            replies, stopped = stage.handle(progress)
            for accepted in progress.accepted:
                log_request(logger, "accepted", accepted.request_id, job=accepted.job)
            if stopped:
                scheduler.send(Stop(stopped))
            if replies:
                api.send(replies)


if __name__ == "__main__":
    main()
