"""The process that runs the engine: ``python -m minisgl.server.scheduler_worker``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import zmq

from minisgl.child_process import Ready, child_process
from minisgl.core import EngineCore
from minisgl.errors import ConfigError, Failure, MiniSGLError
from minisgl.outputs import RequestMetrics
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.scheduler import StepOutput
from minisgl.server.live.state import LIVE
from minisgl.server.live.view import LiveView
from minisgl.server.messages import (
    STATS,
    Abort,
    EngineStats,
    Finished,
    Progress,
    Rejected,
    RequestAccepted,
    SchedulerOptions,
    Started,
    StatsReply,
    StatsRequest,
    Stop,
    Token,
    Tokenized,
    ToScheduler,
)
from minisgl.server.sockets import JOBS, STEPS, Receiver, Sender, address

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
            Started(request.uid, request.cached_tokens, RequestMetrics.of(request).queue_time)
            for request in started.values()
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


MAX_EVENTS = 50_000
"""Events that are kept; a step has about six. Enough for some minutes of decoding, and for a file of some megabytes."""


@contextmanager
def recording(core: EngineCore, path: str) -> Iterator[None]:
    """Record the engine's steps inside the ``with`` block, and write the last ones in Chrome's trace format.

    Enter it before the engine's thread starts, and leave it after that has ended.

    Raises:
        ConfigError: the file cannot be written. This is found out at the beginning.
    """
    try:
        Path(path).touch()
    except OSError as error:
        raise ConfigError(f"trace: cannot write {path} ({error.strerror}); choose another file") from error
    with core.trace(limit=MAX_EVENTS) as trace:
        try:
            yield
        finally:
            trace.export(path)


def views_of(core: EngineCore) -> Views:
    """All views of an engine, to be called between two steps. From now on a `LiveView` follows its steps."""
    live = LiveView(core)
    return {
        STATS: lambda: msgspec.msgpack.encode(_stats(core)),
        LIVE: lambda: msgspec.msgpack.encode(live.look()),
    }


def _stats(core: EngineCore) -> EngineStats:
    scheduler = core.scheduler
    memory = scheduler.memory
    free, cached = memory.pool.num_free, memory.cache.num_evictable
    return EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached)


PATIENCE = 0.5
"""Seconds for which an idle engine sleeps at most."""


def main() -> None:
    """Run the engine until the parent ends this process."""
    with child_process(SchedulerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[ToScheduler](context, address(directory, options.name), ToScheduler, JOBS)
        detokenizer = Sender(context, address(directory, "detokenizer"), STEPS)
        recorded = nullcontext if options.trace is None else partial(recording, path=options.trace)
        with EngineCore(options.engine) as core, recorded(core):
            stage = EngineStage(core, views_of(core))
            report(Ready({"max_seq_len": core.max_seq_len}))
            while True:
                for message in inbox.receive_all(0.0 if stage.has_work else PATIENCE):
                    stage.take(message)
                if not stage.has_work:
                    core.check()
                elif progress := stage.step():
                    detokenizer.send(progress)


if __name__ == "__main__":
    main()
