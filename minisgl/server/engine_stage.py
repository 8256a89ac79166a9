"""The middle station of a job: the engine, which takes tokens and gives tokens, and knows of no text."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from minisgl.core.request import FinishReason, Request
from minisgl.core.sampling_params import SamplingParams
from minisgl.engine_core import EngineCore
from minisgl.errors import MiniSGLError
from minisgl.messages import (
    Abort,
    Failure,
    Finished,
    Progress,
    Rejected,
    RequestAccepted,
    Started,
    StatsReply,
    StatsRequest,
    Stop,
    Token,
    Tokenized,
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
    """Whether its tokens are sent step by step: they are read as they come, or may contain a stop string."""


class EngineStage:
    """Runs an `EngineCore`, which belongs to it. Keeps one state for each unfinished job and choice.

    Args:
        core: the engine.
        views: answers to questions about it.
    """

    def __init__(self, core: EngineCore, views: Views | None = None) -> None:
        self._core = core
        self._views = views or {}
        self._jobs: dict[int, set[int]] = {}
        """Unfinished requests of each job."""
        self._choices: dict[int, _Choice] = {}
        """By the requests' numbers."""
        self._unstarted: set[int] = set()
        """Those of them that have not been reported as started, which is when they leave the queue."""
        self._progress = Progress()

    @property
    def has_work(self) -> bool:
        """Whether another step has something to do or to report."""
        return self._core.has_work or bool(self._choices) or bool(self._progress)

    def take(self, message: ToScheduler) -> None:
        """Act on a message. What there is to report about it comes with the next step."""
        match message:
            case Tokenized():
                self._submit(message)
            case Abort():
                self._end(self._jobs.get(message.job, ()), FinishReason.ABORT)
            case Stop():
                self._end(message.uids, FinishReason.STOP)
            case StatsRequest():
                self._answer(message)

    def step(self) -> Progress:
        """Run one step, if there is one to run, and report what is new since the last."""
        output = self._core.step()
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
                self._core.add(request)
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
        accepted = RequestAccepted(job.job, uids, prompt_lens, job.streaming, list(params.stop), params.min_tokens)
        self._progress.accepted.append(accepted)

    def _requests(self, prompt: bytes, params: SamplingParams, job: Tokenized) -> list[Request]:
        processor = self._core.input_processor
        requests = processor.process(memoryview(prompt).cast("i"), params, job.streaming, job.user)
        processor.check_fits(requests[0])
        return requests

    def _end(self, uids: Iterable[int], reason: FinishReason) -> None:
        for uid in list(uids):
            self._core.finish(uid, reason)

    def _answer(self, request: StatsRequest) -> None:
        view = self._views.get(request.topic)
        content = b"" if view is None else view()
        states = {"scheduler": len(self._jobs) + len(self._choices)}
        self._progress.stats.append(StatsReply(request.number, content, states))

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
