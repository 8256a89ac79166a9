"""The process that runs the engine: ``python -m minisgl.server.scheduler_worker``."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import msgspec
import zmq

from minisgl.child_process import Ready, child_process
from minisgl.core import EngineCore
from minisgl.errors import ConfigError, Failure, MiniSGLError
from minisgl.logs import log_request
from minisgl.outputs import RequestMetrics
from minisgl.request import FinishReason, Request
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.scheduler import StepOutput
from minisgl.server.kv_events import publish_kv_events
from minisgl.server.live.state import LIVE
from minisgl.server.live.view import LiveView
from minisgl.server.messages import (
    FLUSH,
    STATS,
    Abort,
    DraftCounts,
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

Views = Mapping[str, Callable[[], bytes]]  # the answer to each topic of a `StatsRequest`; called between two steps
IDLE_SECONDS = 0.5  # longest sleep of an idle engine
COMPILE_POLL = 0.005  # the same while a grammar is compiled


class EngineStage:
    """Runs an `EngineCore`: jobs in, `Progress` out. Keeps one state for each unfinished job and choice."""

    def __init__(self, core: EngineCore, views: Views | None = None) -> None:
        self._core = core
        self._views = views or {}
        self._jobs: dict[int, set[int]] = {}  # unfinished requests of each job
        self._job_of: dict[int, int] = {}  # by uid
        self._step_by_step: set[int] = set()  # uids whose tokens are sent as they come: streamed, or with stop strings
        self._unstarted: set[int] = set()  # uids that have not been reported to have left the queue
        self._progress = Progress()
        self._compiling: list[tuple[Tokenized, Future[None]]] = []  # jobs whose grammars are not ready yet
        self._compiler = ThreadPoolExecutor(1, thread_name_prefix="minisgl-grammar")

    @property
    def has_work(self) -> bool:
        """Whether another step has something to do or to report."""
        return self._core.has_work or bool(self._job_of) or bool(self._progress) or bool(self._compiling)

    def take(self, message: ToScheduler) -> None:
        """Handle a message. Its outcome is reported by the next `step`."""
        match message:
            case Tokenized():
                self._prepare(message)
            case Abort():
                self._end(self._jobs.get(message.job, ()), FinishReason.ABORT)
            case Stop():
                self._end(message.uids, FinishReason.STOP)
            case StatsRequest():
                self._answer(message)

    def step(self) -> Progress:
        """Run one step, if there is work, and report what is new since the last."""
        self._submit_compiled()
        output = self._core.step()
        progress, self._progress = self._progress, Progress()
        progress.started = self._started(output)
        progress.tokens = self._tokens(output)
        progress.finished = [self._forget(request) for request in output.finished if request.uid in self._job_of]
        return progress

    def _prepare(self, job: Tokenized) -> None:
        """Submit a job, once its grammar is compiled in another thread: the steps of other requests do not wait."""
        if "json_schema" not in job.params and "regex" not in job.params:
            self._submit(job)
            return
        compile_grammar = self._core.input_processor.grammars.compile
        compiled = self._compiler.submit(lambda: compile_grammar(SamplingParams(**job.params)))
        self._compiling.append((job, compiled))

    def _submit_compiled(self) -> None:
        """Submit the jobs whose grammars are ready. If there is nothing else to do, wait a moment for one."""
        if self._compiling and not self._core.has_work:
            wait([self._compiling[0][1]], COMPILE_POLL)
        while self._compiling and self._compiling[0][1].done():
            job, compiled = self._compiling.pop(0)
            if (error := compiled.exception()) is None:
                self._submit(job)
            else:
                self._reject(job, error)

    def _submit(self, job: Tokenized) -> None:
        """Enqueue all requests of a job, or none of them."""
        requests: list[Request] = []
        try:
            params = SamplingParams(**job.params)
            processor = self._core.input_processor
            for prompt in job.prompts:
                token_ids = memoryview(prompt).cast("i")
                choices = processor.process(token_ids, params, job.streaming, job.user)
                processor.check_fits(choices[0])
                requests += choices
            for request in requests:
                request.group, request.client = requests[0].uid, job.client
                self._core.add(request)
        except Exception as error:  # a malformed job, or a full queue, ends this job alone
            self._end([request.uid for request in requests], FinishReason.ABORT)
            self._reject(job, error)
            return
        uids = [request.uid for request in requests]
        self._jobs[job.job] = set(uids)
        self._job_of |= dict.fromkeys(uids, job.job)
        if job.streaming or params.stop:
            self._step_by_step.update(uids)
        self._unstarted.update(uids)
        prompt_lens = [request.prompt_len for request in requests[:: params.n]]
        accepted = RequestAccepted(
            job.job, uids, prompt_lens, job.streaming, list(params.stop), params.min_tokens, job.request_id
        )
        self._progress.accepted.append(accepted)

    def _reject(self, job: Tokenized, error: BaseException) -> None:
        if not isinstance(error, MiniSGLError):
            logger.error("job %d (%s) cannot be submitted", job.job, job.request_id, exc_info=error)
        self._progress.rejected.append(Rejected(job.job, Failure.of(error)))

    def _end(self, uids: Iterable[int], reason: FinishReason) -> None:
        for uid in list(uids):
            self._core.finish(uid, reason)

    def _answer(self, request: StatsRequest) -> None:
        view = self._views.get(request.topic)
        content = b"" if view is None else view()
        states = {"scheduler": len(self._jobs) + len(self._job_of) + len(self._compiling)}
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
            Token(event.request.uid, event.token_id, event.logprobs, _drafts(event.request))
            for event in output.events
            if event.request.uid in self._step_by_step
        ]

    def _forget(self, request: Request) -> Finished:
        uid = request.uid
        job = self._job_of.pop(uid)
        self._jobs[job].remove(uid)
        if not self._jobs[job]:
            del self._jobs[job]
        assert request.finish_reason is not None
        reason = request.finish_reason.value
        if uid in self._step_by_step:
            self._step_by_step.remove(uid)
            return Finished(uid, reason, request.error, drafts=_drafts(request))
        return Finished(uid, reason, request.error, request.output, request.logprobs, _drafts(request))


def _drafts(request: Request) -> DraftCounts:
    return request.accepted_drafts, request.rejected_drafts


def engine_views(core: EngineCore) -> Views:
    """All views of an engine, to be called between two steps. From now on a `LiveView` observes its steps."""
    live = LiveView(core)
    return {
        STATS: lambda: msgspec.msgpack.encode(_stats(core)),
        LIVE: lambda: msgspec.msgpack.encode(live.look()),
        FLUSH: lambda: msgspec.msgpack.encode(core.scheduler.memory.flush()),
    }


def _stats(core: EngineCore) -> EngineStats:
    scheduler = core.scheduler
    memory = scheduler.memory
    free, cached = memory.pool.num_free, memory.cache.num_evictable
    store = {} if memory.offload is None else memory.offload.counts
    stats = EngineStats(len(scheduler.waiting), len(scheduler.table), memory.num_pages, free, cached, store)
    return stats if scheduler.speculation is None else msgspec.structs.replace(stats, **scheduler.speculation.counts)


MAX_EVENTS = 50_000  # the last ones are kept; a step has about six: some minutes of decoding, some megabytes


@contextmanager
def record_trace(core: EngineCore, path: str | None) -> Iterator[None]:
    """Record the steps of the ``with`` block around the engine's thread; write the last ones in Chrome's trace format.

    Without a path, do nothing. Raises `ConfigError` if the file cannot be written: on entry, or once the disk is full.
    """
    if path is None:
        yield
        return
    with _naming(path):
        Path(path).write_text("{}")  # something, since a device may be full
    with core.trace(limit=MAX_EVENTS) as trace:
        try:
            yield
        finally:
            with _naming(path):
                trace.export(path)


@contextmanager
def _naming(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(f"trace: cannot write {path} ({error.strerror}); choose another file") from error


def main() -> None:
    """Run the engine until the parent ends this process."""
    with child_process(SchedulerOptions) as (options, report):
        context, directory = zmq.Context(), Path(options.directory)
        inbox = Receiver[ToScheduler](context, address(directory, options.name), ToScheduler, JOBS)
        detokenizer = Sender(context, address(directory, "detokenizer"), STEPS)
        with (
            EngineCore(options.engine) as core,
            record_trace(core, options.trace),
            publish_kv_events(core, options.kv_events, options.kv_events_replay, options.kv_events_topic),
        ):
            stage = EngineStage(core, engine_views(core))
            report(Ready({"max_seq_len": core.max_seq_len}))
            while True:
                for message in inbox.receive_all(0.0 if stage.has_work else IDLE_SECONDS):
                    stage.take(message)
                    if isinstance(message, Tokenized):
                        log_request(logger, "submitted", message.request_id, job=message.job)
                if not stage.has_work:
                    core.check()
                elif progress := stage.step():
                    detokenizer.send(progress)


if __name__ == "__main__":
    main()
