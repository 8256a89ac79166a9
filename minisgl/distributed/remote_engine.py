"""The engine of a driver that holds no rank: it passes steps on to the ranks' processes, and tokens back."""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from minisgl.core.batch import Batch, StepObserver, StepResult
from minisgl.core.config import EngineConfig
from minisgl.core.registry import resolve
from minisgl.distributed.communicator import choose_communicator
from minisgl.distributed.control_plane import CONTROL_PLANES
from minisgl.distributed.messages import EngineInfo, RankOptions, Stepped, encode_batch
from minisgl.distributed.rank_group import RankGroup
from minisgl.distributed.rendezvous import open_store
from minisgl.distributed.reports import ReportReader
from minisgl.engine.build import rank_device
from minisgl.errors import ConfigError, EngineDead, MiniSGLError, ModelLoadError
from minisgl.models import ModelConfig
from minisgl.processes import wait_until_ready

_START_TIMEOUT = 3600.0
"""Seconds in which all ranks must have built their engines. A collective that hangs ends sooner."""
_SLACK = 10.0
"""Seconds by which the driver waits longer for a step than ranks do for each other, whose errors say more."""
_PATIENCE = 5.0
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

    def _mark_dead(self, reason: str, patience: float = _PATIENCE) -> EngineDead:
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
            dead = self.group.fail(str(error), _PATIENCE)
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
