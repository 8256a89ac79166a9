"""The processes of the ranks: if one of them is lost, all end together."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from minisgl.batch import Batch, StepObserver, StepResult
from minisgl.config import EngineConfig
from minisgl.distributed.communicator import choose_communicator
from minisgl.distributed.control_plane import CONTROL_PLANES
from minisgl.distributed.messages import EngineInfo, RankOptions, Stepped, encode_batch
from minisgl.distributed.rank_process import ReportReader, loopback, open_store
from minisgl.engine.build import rank_device
from minisgl.errors import ConfigError, EngineDead, MiniSGLError, ModelLoadError
from minisgl.models.config import ModelConfig
from minisgl.processes import ChildProcess, join_threads, wait_until_ready
from minisgl.registry import resolve

_GRACE = 0.1
"""Seconds in which other ranks may be found to have ended as well, before it is decided which one began."""
_ANSWER = 2.0
"""Seconds in which a rank that is not stopped answers."""
_PATIENCE = 10.0
"""Seconds that killed processes may take to disappear."""


class RankGroup:
    """Child processes that live and die together.

    If a rank is lost (`ChildProcess` says when it is), a thread kills the others: nothing is left on a GPU, and no rank
    waits for a collective that will never be complete.
    """

    def __init__(self) -> None:
        self.end: str | None = None
        """Why the ranks are gone."""
        self.children: list[ChildProcess] = []
        self.alarm, self._bell = os.pipe()
        self._news: queue.SimpleQueue[int | str] = queue.SimpleQueue()
        """Ranks that have ended, and reasons to end all of them."""
        self._watch: threading.Thread | None = None
        self._closed = False

    def start(self, options: Sequence[RankOptions], store: object) -> None:
        """Start a process for each, in the order of the ranks.

        Args:
            options: of the ranks.
            store: where they meet. It is kept open as long as they live, and no longer.

        Raises:
            OSError, RuntimeError: a process or thread cannot be started. `close` ends the others.
        """
        watch = threading.Thread(target=self._run, args=(store,), name="minisgl-ranks", daemon=True)
        watch.start()
        self._watch = watch
        for each in options:
            child = _start(each)
            self.children.append(child)
            child.exited.add_done_callback(partial(self._hear_of_exit, each.rank))

    def check(self) -> None:
        """Raise `EngineDead` if the ranks are gone."""
        if self.end is not None:
            raise EngineDead(self.end)

    def fail(self, reason: str, patience: float = 0.0) -> EngineDead:
        """Kill all ranks.

        Args:
            reason: what `check` says from now on, unless a rank is found to have ended by itself.
            patience: seconds to wait for just that.
        """
        if self._watch is not None:
            join_threads([self._watch], patience)
            self._news.put(reason)
            join_threads([self._watch], _PATIENCE)
        self.end = self.end or reason
        return EngineDead(self.end)

    def close(self) -> None:
        """Kill all ranks and wait until they are gone. May be called twice."""
        self.fail("the engine was closed")
        wait([child.exited for child in self.children], _PATIENCE)
        if not self._closed:
            self._closed = True
            os.close(self.alarm)
            if self._watch is None:
                os.close(self._bell)

    def _hear_of_exit(self, rank: int, exited: Future[EngineDead]) -> None:
        self._news.put(rank)

    # -- in a thread ---------------------------------------------------------------------------------------------------

    def _run(self, store: object) -> None:
        first = self._news.get()
        self.end = first if isinstance(first, str) else self._verdict(first)
        for child in self.children:
            child.kill()
        os.close(self._bell)  # whoever waits for a rank sees that the other end of this pipe is closed

    def _verdict(self, first: int) -> str:
        """Which rank is to blame, and what is known of why.

        A rank that is lost takes others along, whose connections break or whose collectives time out. So the first to
        end may be a victim. To blame is one that stands still, then one that was killed, and only then the first.
        """
        ended = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(rank := self._news.get(timeout=_GRACE), int):
                ended.append(rank)
        children = [self.children[rank] for rank in ended]
        for child in children:
            if child.hung or child.exit_code == -signal.SIGKILL:
                return str(child.exited.result())
        blamed = next((child for child in children if (child.exit_code or 0) < 0), children[0])
        error, stopped = str(blamed.exited.result()), self._stopped()
        return error if stopped is None else f"{stopped} does not answer; it is stopped or hangs ({error})"

    def _stopped(self) -> str | None:
        """The first rank that lives and is at work, and does not answer."""
        at_work = [child for child in self.children if child.ready.done() and not child.exited.done()]
        silent = [child for child in at_work if not child.answers(_ANSWER)]
        return next((child.title for child in silent if not child.exited.done()), None)


def _start(options: RankOptions) -> ChildProcess:
    """No port of a rank is open to other machines. Ranks that wait for each other have collectives with a timeout and
    a driver with another one, so they have both before they are taken for ranks that hang."""
    config, interface = options.config, loopback()
    local = {} if interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return ChildProcess(
        "minisgl.distributed.rank_process",
        options,
        title=f"rank {options.rank}",
        hang_timeout=config.hang_timeout,
        turn_timeout=config.distributed_timeout + (config.hang_timeout or 0.0),
        environment={**local, "OMP_NUM_THREADS": str(options.threads)},
        pass_fds=(options.reports, *options.endpoint.fds),
        prefix=f"[rank {options.rank}] ",
    )


_START_TIMEOUT = 3600.0
"""Seconds in which all ranks must have built their engines. A collective that hangs ends sooner."""
_SLACK = 10.0
"""Seconds by which the driver waits longer for a step than ranks do for each other, whose errors say more."""
_REPORT_PATIENCE = 5.0
"""Seconds that a rank takes at most to end after it could not be talked to."""


@dataclass(frozen=True, slots=True)
class RemoteStep:
    """A step that the ranks were told to run."""

    engine: RemoteEngine
    number: int

    def wait(self) -> StepResult:
        """Block until its tokens are here. Steps are waited for in the order in which they were launched.

        Raises:
            EngineDead: the ranks are gone.
        """
        return self.engine.result(self.number)


class RemoteEngine:
    """An `Executor` over ``tensor_parallel_size`` ranks, each of which is a process with an `Engine` of its own.

    The driver's process has no model and nothing on a GPU, so whatever goes wrong on a rank, all of them can be killed
    and the driver is still there to say so.

    Args:
        config: options.
        path: directory of the checkpoint.

    Raises:
        ConfigError: an option cannot work here.
        ModelLoadError: the checkpoint is not usable.
        EngineDead: a rank has ended while it was started, or the system does not allow for its process or files.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self.config = config
        self.model_config = ModelConfig.from_dir(path, config.architecture)
        self.device = torch.device(rank_device(config, 0).type)
        choose_communicator(config.all_reduce, self.device, config.distributed_timeout)
        make_plane = resolve("control_plane", config.control_plane, CONTROL_PLANES)
        self._launched = 0
        with ExitStack() as stack, ExitStack() as lent:
            with _refusals_told():
                self.group = RankGroup()
                stack.callback(self.group.close)
                self._plane = make_plane(config.tensor_parallel_size, self.group.check)
                stack.callback(self._plane.close)
                self._readers, writers = [], []
                for _ in range(config.tensor_parallel_size):
                    reader, writer = os.pipe()
                    lent.callback(os.close, writer)
                    writers.append(writer)
                    self._readers.append(ReportReader(reader, self.group.alarm, self.group.check))
                    stack.callback(self._readers[-1].close)
            stack.callback(self.group.close)  # once more: ranks end before what they talk over does
            info = self._start(path, writers)
            self.close = weakref.finalize(self, stack.pop_all().close)
        self.num_pages = info.num_pages
        self.page_bytes, self.model_bytes, self.runner_bytes = info.page_bytes, info.model_bytes, info.runner_bytes
        self.max_seq_len = info.max_seq_len
        self.observers: list[StepObserver] = []
        """Are told nothing: what the ranks' devices do is not seen from here."""
        self.local_engine: None = None
        self.attention_choice = info.attention

    def launch(self, batch: Batch) -> RemoteStep:
        """Tell all ranks to run a step. Does not wait for any of them.

        Raises:
            EngineDead: the ranks are gone.
        """
        self.check()
        message = encode_batch(batch)
        try:
            self._plane.send(message, self.config.distributed_timeout)
        except Exception as error:
            raise self._mark_dead(f"a step was not sent: {type(error).__name__}: {error}") from error
        except BaseException:  # an interrupt, after which some ranks may know of the step and others not
            self._mark_dead("interrupted while a step was sent", patience=0.0)
            raise
        self._launched += 1
        return RemoteStep(self, self._launched - 1)

    def result(self, step: int) -> StepResult:
        """See `RemoteStep.wait`."""
        self.check()
        stepped = self._await_step(self._readers[0], step)
        if self.config.verify_ranks:
            for rank, reader in enumerate(self._readers[1:], start=1):
                if self._await_step(reader, step).digest != stepped.digest:
                    raise self._mark_dead(f"ranks 0 and {rank} disagree on the tokens of step {step}", patience=0.0)
        return StepResult(np.frombuffer(stepped.tokens, dtype=np.int32).copy(), stepped.logprobs)

    def _await_step(self, reader: ReportReader, step: int) -> Stepped:
        while True:
            try:
                report = reader.read(self.config.distributed_timeout + _SLACK)
            except EngineDead as error:
                raise self._mark_dead(f"step {step}: {error}", patience=0.0) from None
            except TimeoutError as error:
                reason = f"step {step}: {error}; if the ranks are slow rather than stuck, raise distributed_timeout"
                raise self._mark_dead(reason, patience=0.0) from None
            if report.step == step:
                return report

    def check(self) -> None:
        """Raise `EngineDead` if a rank has ended."""
        if self.group.end is not None:
            raise self._mark_dead(self.group.end, patience=0.0)

    def _mark_dead(self, reason: str, patience: float = _REPORT_PATIENCE) -> EngineDead:
        """End all ranks, and keep nothing that was needed to talk to them. See `RankGroup.fail`."""
        dead = self.group.fail(reason, patience)
        self.close()
        return dead

    def _start(self, path: Path, writers: Sequence[int]) -> EngineInfo:
        """Start the ranks and wait until they are ready."""
        with _refusals_told():
            store = open_store()
            self.group.start([self._options(path, *each, store.port) for each in enumerate(writers)], store)
        del store
        try:
            self._plane.connect(_START_TIMEOUT)
            wait_until_ready(self.group.children, _START_TIMEOUT)
        except TimeoutError as error:
            raise self.group.fail(str(error)) from None
        except MiniSGLError as error:  # a victim's, perhaps: what another says of options or files explains more
            dead = self.group.fail(str(error), _REPORT_PATIENCE)
            self.group.close()
            failures = [child.ready.exception() for child in self.group.children if child.exited.done()]
            raise next((each for each in failures if isinstance(each, (ConfigError, ModelLoadError))), dead) from None
        return msgspec.convert(self.group.children[0].ready.result().info, EngineInfo)

    def _options(self, path: Path, rank: int, writer: int, store_port: int) -> RankOptions:
        return RankOptions(
            name=f"rank-{rank}",
            rank=rank,
            config=self.config,
            path=str(path),
            store_port=store_port,
            endpoint=self._plane.endpoint(rank),
            reports=writer,
            threads=max(1, torch.get_num_threads() // self.config.tensor_parallel_size),
        )


@contextmanager
def _refusals_told() -> Iterator[None]:
    """Say what a user can do about what the system does not allow for."""
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter from threads and from PyTorch's store
        raise EngineDead(
            f"the ranks could not be started: {error}; if there are too many open files or processes, close some or "
            "raise the limits (ulimit -n, ulimit -u)"
        ) from error
