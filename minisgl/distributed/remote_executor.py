"""The executor for tensor parallelism: it starts a process for each rank, sends them steps and reads their tokens."""

from __future__ import annotations

import contextlib
import os
import pickle
import queue
import signal
import threading
import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import torch

from minisgl.batch import Batch, StepObserver, StepResult
from minisgl.config import EngineConfig
from minisgl.distributed.communicator import select_communicator
from minisgl.distributed.control_plane import CONTROL_PLANES
from minisgl.distributed.messages import EngineInfo, RankOptions, StepReport, encode_batch
from minisgl.distributed.rank_process import ReportReader, loopback_interface, open_store
from minisgl.engine.build import rank_device
from minisgl.errors import ConfigError, EngineDead, MiniSGLError, ModelLoadError
from minisgl.kvcache.host_store import QueuedCopies, slots_that_fit
from minisgl.models.config import ModelConfig
from minisgl.processes import ChildProcess, join_threads, wait_until_ready
from minisgl.registry import resolve

# In seconds, for
_START_TIMEOUT = 3600.0  # all ranks to build their engines; a collective that hangs ends sooner
_REPORT_SLACK = 10.0  # the driver to wait for a step longer than ranks for each other, as their errors say more
_FAILURE_TIMEOUT = 5.0  # a rank that cannot be reached to end with an error, before all are killed
_EXIT_WINDOW = 0.1  # other ranks to end as well, before one of them is blamed
_PING_TIMEOUT = 2.0  # a rank to answer a ping
_KILL_TIMEOUT = 10.0  # killed processes to disappear


class RemoteExecutor:
    """An `Executor` over ``tensor_parallel_size`` ranks, each a process with an `Engine`; the driver uses no GPU.

    Raises:
        ConfigError: an option cannot work here.
        ModelLoadError: the checkpoint cannot be used.
        EngineDead: a rank ended while it started, or the system refuses processes or files.
    """

    def __init__(self, config: EngineConfig, path: Path) -> None:
        self.config = config
        self.model_config = ModelConfig.from_dir(path, config.architecture)
        self.device = torch.device(rank_device(config, 0).type)
        select_communicator(config.all_reduce, self.device, config.distributed_timeout)  # its errors come early
        make_plane = resolve("control_plane", config.control_plane, CONTROL_PLANES)
        self._launched = 0
        with ExitStack() as stack, ExitStack() as lent:
            with _system_limits_explained():
                self.processes = RankProcesses()
                stack.callback(self.processes.close)
                self._plane = make_plane(config.tensor_parallel_size, self.processes.check)
                stack.callback(self._plane.close)
                self._readers, writers = [], []
                for _ in range(config.tensor_parallel_size):
                    reader, writer = os.pipe()
                    lent.callback(os.close, writer)
                    writers.append(writer)
                    self._readers.append(ReportReader(reader, self.processes.exit_fd, self.processes.check))
                    stack.callback(self._readers[-1].close)
            stack.callback(self.processes.close)  # again: the ranks must end before their pipes are closed
            info = self._start(path, writers)
            self.close = weakref.finalize(self, stack.pop_all().close)
        self.num_pages, self.num_window_pages = info.num_pages, info.num_window_pages
        self.page_bytes, self.model_bytes, self.graph_bytes = info.page_bytes, info.model_bytes, info.graph_bytes
        self.max_seq_len = info.max_seq_len
        self.attention_choice = info.attention
        self.local_engine: None = None
        self.page_copier: QueuedCopies | None = None
        if config.page_store == "host":
            slots = slots_that_fit(config.page_store_gib, info.page_bytes, config.tensor_parallel_size)
            self.page_copier = QueuedCopies(slots)
        self.observers: list[StepObserver] = []  # never notified, because the ranks compute in other processes

    def _start(self, path: Path, writers: Sequence[int]) -> EngineInfo:
        with _system_limits_explained():
            store = open_store()
            self.processes.start([self._options(path, *each, store.port) for each in enumerate(writers)], store)
        del store
        try:
            self._plane.connect(_START_TIMEOUT)
            wait_until_ready(self.processes.children, _START_TIMEOUT)
        except TimeoutError as error:
            raise self.processes.kill(str(error)) from None
        except (
            MiniSGLError
        ) as error:  # another rank's error about options or files explains more than a lost connection
            dead = self.processes.kill(str(error), _FAILURE_TIMEOUT)
            self.processes.close()
            failures = [child.ready.exception() for child in self.processes.children if child.exited.done()]
            raise next((each for each in failures if isinstance(each, (ConfigError, ModelLoadError))), dead) from None
        return msgspec.convert(self.processes.children[0].ready.result().info, EngineInfo)

    def _options(self, path: Path, rank: int, writer: int, store_port: int) -> RankOptions:
        return RankOptions(
            name=f"rank-{rank}",
            rank=rank,
            config=self.config,
            path=str(path),
            model_config=pickle.dumps(self.model_config),
            store_port=store_port,
            endpoint=self._plane.endpoint(rank),
            reports=writer,
            threads=max(1, torch.get_num_threads() // self.config.tensor_parallel_size),
        )

    def launch(self, batch: Batch) -> RemoteStep:
        """Send a step to all ranks, without waiting for them. Raises `EngineDead` if the ranks are gone."""
        self.check()
        if self.page_copier is not None:
            batch = replace(batch, page_moves=self.page_copier.take())
        message = encode_batch(batch)
        try:
            self._plane.send(message, self.config.distributed_timeout)
        except Exception as error:
            reason = f"a step was not sent: {type(error).__name__}: {error}"
            raise self._mark_dead(reason, _FAILURE_TIMEOUT) from error
        except BaseException:  # an interrupt, after which perhaps only some ranks have the step
            self._mark_dead("interrupted while a step was sent")
            raise
        self._launched += 1
        return RemoteStep(self, self._launched - 1)

    def result(self, step: int) -> StepResult:
        """Wait for the tokens of step number ``step``. Raises `EngineDead` if the ranks are gone."""
        self.check()
        report = self._read_report(self._readers[0], step)
        if self.config.verify_ranks:
            for rank, reader in enumerate(self._readers[1:], start=1):
                if self._read_report(reader, step).digest != report.digest:
                    raise self._mark_dead(f"ranks 0 and {rank} disagree on the tokens of step {step}")
        return StepResult(np.frombuffer(report.tokens, dtype=np.int32).copy(), report.logprobs)

    def _read_report(self, reader: ReportReader, step: int) -> StepReport:
        while True:
            try:
                report = reader.read(self.config.distributed_timeout + _REPORT_SLACK)
            except EngineDead as error:
                raise self._mark_dead(f"step {step}: {error}") from None
            except TimeoutError as error:
                reason = f"step {step}: {error}; if the ranks are slow rather than stuck, raise distributed_timeout"
                raise self._mark_dead(reason) from None
            if report.step == step:
                return report

    def check(self) -> None:
        """Raise `EngineDead` if a rank has ended."""
        if self.processes.exit_reason is not None:
            raise self._mark_dead(self.processes.exit_reason)

    def _mark_dead(self, reason: str, patience: float = 0.0) -> EngineDead:
        """Kill all ranks, as `RankProcesses.kill` does, and close everything that was used to talk to them."""
        dead = self.processes.kill(reason, patience)
        self.close()
        return dead


@dataclass(frozen=True, slots=True)
class RemoteStep:
    """A step that was sent to the ranks. Wait for steps in the order of their launches."""

    executor: RemoteExecutor
    number: int

    def wait(self) -> StepResult:
        return self.executor.result(self.number)


class RankProcesses:
    """The processes of the ranks. If one ends or hangs, a thread kills all others, which would wait for it forever."""

    def __init__(self) -> None:
        self.exit_reason: str | None = None  # why the ranks are gone
        self.children: list[ChildProcess] = []
        self.exit_fd, self._exit_writer = os.pipe()  # readable once the ranks are gone
        self._exits: queue.SimpleQueue[int | str] = queue.SimpleQueue()  # ranks that ended, and reasons to kill all
        self._watcher: threading.Thread | None = None
        self._closed = False

    def start(self, options: Sequence[RankOptions], store: object) -> None:
        """Start a process for each rank, and keep the store where they meet open while they live.

        Raises `OSError` or `RuntimeError` if a process or thread cannot be started; `close` ends the others.
        """
        watcher = threading.Thread(target=self._watch, args=(store,), name="minisgl-ranks", daemon=True)
        watcher.start()
        self._watcher = watcher
        for each in options:
            child = _start_rank(each)
            self.children.append(child)
            child.exited.add_done_callback(partial(self._on_exit, each.rank))

    def check(self) -> None:
        """Raise `EngineDead` if the ranks are gone."""
        if self.exit_reason is not None:
            raise EngineDead(self.exit_reason)

    def kill(self, reason: str, patience: float = 0.0) -> EngineDead:
        """Kill all ranks, and return the error that says why: ``reason``, unless a rank ends within ``patience``
        seconds for another one."""
        if self._watcher is not None:
            join_threads([self._watcher], patience)
            self._exits.put(reason)
            join_threads([self._watcher], _KILL_TIMEOUT)
        self.exit_reason = self.exit_reason or reason
        return EngineDead(self.exit_reason)

    def close(self) -> None:
        """Kill all ranks and wait until they are gone. Calling it again does nothing."""
        self.kill("the engine was closed")
        wait([child.exited for child in self.children], _KILL_TIMEOUT)
        if not self._closed:
            self._closed = True
            os.close(self.exit_fd)
            if self._watcher is None:
                os.close(self._exit_writer)

    def _on_exit(self, rank: int, exited: Future[EngineDead]) -> None:
        self._exits.put(rank)

    # -- in the watcher's thread ---------------------------------------------------------------------------------------

    def _watch(self, store: object) -> None:
        first = self._exits.get()
        self.exit_reason = first if isinstance(first, str) else self._find_cause(first)
        for child in self.children:
            child.kill()
        os.close(self._exit_writer)  # wakes all readers of `exit_fd`

    def _find_cause(self, first: int) -> str:
        """Say which rank failed, and why: one that hangs, else one that was killed, else the first to end.

        The first may be a victim, whose connection broke or whose collective timed out.
        """
        ended = [first]
        with contextlib.suppress(queue.Empty):
            while isinstance(rank := self._exits.get(timeout=_EXIT_WINDOW), int):
                ended.append(rank)
        children = [self.children[rank] for rank in ended]
        for child in children:
            if child.hung or child.exit_code == -signal.SIGKILL:
                return str(child.exited.result())
        blamed = next((child for child in children if (child.exit_code or 0) < 0), children[0])
        error, hanging = str(blamed.exited.result()), self._find_hanging()
        return error if hanging is None else f"{hanging} does not answer; it is stopped or hangs ({error})"

    def _find_hanging(self) -> str | None:
        running = [child for child in self.children if child.ready.done() and not child.exited.done()]
        silent = [child for child in running if not child.answers(_PING_TIMEOUT)]
        return next((child.title for child in silent if not child.exited.done()), None)


def _start_rank(options: RankOptions) -> ChildProcess:
    config, interface = options.config, loopback_interface()
    # Ranks open their ports to this machine alone.
    local = {} if interface is None else dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), interface)
    return ChildProcess(
        "minisgl.distributed.rank_process",
        options,
        title=f"rank {options.rank}",
        hang_timeout=config.hang_timeout,
        # A rank that waits in a collective does not hang, so its main loop may take that timeout longer.
        turn_timeout=config.distributed_timeout + (config.hang_timeout or 0.0),
        environment={**local, "OMP_NUM_THREADS": str(options.threads)},
        pass_fds=(options.reports, *options.endpoint.fds),
        prefix=f"[rank {options.rank}] ",
    )


@contextmanager
def _system_limits_explained() -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as error:  # the latter from threads and from PyTorch's store
        raise EngineDead(
            f"the ranks could not be started: {error}; if there are too many open files or processes, close some or "
            "raise the limits (ulimit -n, ulimit -u)"
        ) from error
