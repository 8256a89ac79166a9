"""The middle station of a job: the engine, which takes tokens and gives tokens, and knows of no text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from minisgl.core.request import FinishReason, Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.errors import ContextExceeded, MiniSGLError
from minisgl.llm import LLM
from minisgl.messages import (
    Abort,
    Begun,
    Failure,
    Finished,
    Progress,
    Question,
    Rejected,
    Started,
    Stop,
    Token,
    Tokenized,
    Told,
)
from minisgl.messages.jobs import ToScheduler
from minisgl.outputs import Metrics
from minisgl.scheduler import StepOutput

logger = logging.getLogger(__name__)

Views = Mapping[str, Callable[[], bytes]]
"""What can be asked about an engine, by topic; called between two steps."""


@dataclass(frozen=True, slots=True)
class _Choice:
    job: int
    followed: bool
    """Whether its tokens are sent step by step: somebody reads them, or a stop string may be among them."""


class EngineStage:
    """Runs an `LLM`, which belongs to it. Keeps one state for each unfinished job and choice.

    Args:
        llm: the engine.
        views: answers to questions about it.
    """

    def __init__(self, llm: LLM, views: Views | None = None) -> None:
        self._llm = llm
        self._views = views or {}
        self._jobs: dict[int, set[int]] = {}
        """Unfinished requests of each job."""
        self._choices: dict[int, _Choice] = {}
        """By the requests' numbers."""
        self._unstarted: set[int] = set()
        """Those of them of which nobody has been told that they left the queue."""
        self._progress = Progress()

    @property
    def has_work(self) -> bool:
        """Whether another step has something to do or to tell."""
        return self._llm.scheduler.has_work or bool(self._choices) or bool(self._progress)

    def take(self, message: ToScheduler) -> None:
        """Act on a message. What there is to tell about it comes with the next step."""
        match message:
            case Tokenized():
                self._submit(message)
            case Abort():
                self._end(self._jobs.get(message.job, ()), FinishReason.ABORT)
            case Stop():
                self._end(message.uids, FinishReason.STOP)
            case Question():
                self._answer(message)

    def step(self) -> Progress:
        """Run one step, if there is one to run, and tell what is new since the last."""
        output = self._llm.step()
        progress, self._progress = self._progress, Progress()
        progress.started = self._started(output)
        progress.tokens = self._tokens(output)
        progress.finished = [self._forget(request) for request in output.finished if request.uid in self._choices]
        return progress

    def _submit(self, job: Tokenized) -> None:
        """Enqueue all requests of a job, or none of them."""
        requests: list[Request] = []
        try:
            params = SamplingParams(**job.params)
            for prompt in job.prompts:
                requests += self._requests(prompt, params, job)
            for request in requests:
                self._llm.scheduler.add(request)
        except Exception as error:  # a malformed job, or a full queue, ends this job alone
            if not isinstance(error, MiniSGLError):
                logger.exception("job %d cannot be submitted", job.job)
            self._end([request.uid for request in requests], FinishReason.ABORT)
            self._progress.rejected.append(Rejected(job.job, Failure.of(error)))
            return
        uids = [request.uid for request in requests]
        self._jobs[job.job] = set(uids)
        self._choices |= dict.fromkeys(uids, _Choice(job.job, job.streaming or bool(params.stop)))
        self._unstarted.update(uids)
        prompt_lens = [request.prompt_len for request in requests[:: params.n]]
        begun = Begun(job.job, uids, prompt_lens, job.streaming, list(params.stop), params.min_tokens)
        self._progress.begun.append(begun)

    def _requests(self, prompt: bytes, params: SamplingParams, job: Tokenized) -> list[Request]:
        """The requests of a prompt. Their text is made elsewhere, so nobody tells their generations of tokens."""
        token_ids = memoryview(prompt).cast("i")
        requests = [each.request for each in self._llm.prepare(token_ids, params, job.streaming, job.user)]
        self._check_fits(requests[0])
        return requests

    def _check_fits(self, request: Request) -> None:
        """Refuse at the edge what the KV cache could never finish, however idle the engine is."""
        memory = self._llm.scheduler.memory
        capacity = memory.num_pages * memory.page_size
        if request.max_len - 1 <= capacity:  # the last token is never fed, so its KV needs no room
            return
        if request.prompt_len > capacity:
            raise ContextExceeded("prompt", f"{request.prompt_len} tokens do not fit the KV cache of {capacity} tokens")
        room = capacity + 1 - request.prompt_len
        raise ContextExceeded(
            "max_tokens",
            f"{request.max_len - request.prompt_len} with a prompt of {request.prompt_len} tokens exceed the KV cache "
            f"of {capacity} tokens; at most {room} fit",
        )

    def _end(self, uids: Iterable[int], reason: FinishReason) -> None:
        for uid in list(uids):
            self._llm.scheduler.finish(uid, reason)

    def _answer(self, question: Question) -> None:
        view = self._views.get(question.topic)
        content = b"" if view is None else view()
        self._progress.told.append(Told(question.number, content, {"scheduler": len(self._jobs) + len(self._choices)}))

    def _started(self, output: StepOutput) -> list[Started]:
        requests = [*(event.request for event in output.events), *output.finished]
        started = {request.uid: request for request in requests if request.uid in self._unstarted}
        self._unstarted -= started.keys()
        return [
            Started(request.uid, request.cached_tokens, Metrics.of(request).queue_time) for request in started.values()
        ]

    def _tokens(self, output: StepOutput) -> list[Token]:
        return [
            Token(event.request.uid, event.token_id, event.logprobs)
            for event in output.events
            if (choice := self._choices.get(event.request.uid)) is not None and choice.followed
        ]

    def _forget(self, request: Request) -> Finished:
        choice = self._choices.pop(request.uid)
        unfinished = self._jobs[choice.job]
        unfinished.remove(request.uid)
        if not unfinished:
            del self._jobs[choice.job]
        assert request.finish_reason is not None
        reason = request.finish_reason.value
        if choice.followed:
            return Finished(request.uid, reason, request.error)
        return Finished(request.uid, reason, request.error, request.output, request.logprobs)
