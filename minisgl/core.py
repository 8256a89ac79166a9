"""The engine without text: requests of token ids go in, and each step reports the new tokens and the finished requests.

`LLM` and the server's engine stage both drive an `EngineCore`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

from minisgl.batch import StepLauncher, StepObserver
from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.distributed.remote_executor import RemoteExecutor
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.errors import ConfigError, EngineDead
from minisgl.input_processor import InputProcessor
from minisgl.kvcache.page_store import PAGE_STORES
from minisgl.kvcache.prefix import select_prefix_cache
from minisgl.models.config import ModelConfig
from minisgl.models.hub import resolve_model
from minisgl.registry import resolve
from minisgl.request import FinishReason, Request
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler, StepOutput
from minisgl.table import RunningTable
from minisgl.tokenizer import Tokenizer
from minisgl.trace import Trace, TraceObserver, observed

logger = logging.getLogger(__name__)


class Executor(StepLauncher, Protocol):
    """Computes the steps of an engine: an `Engine` in this process, or a `RemoteExecutor` over the ranks' processes."""

    model_config: ModelConfig
    device: torch.device
    """Of tensor-parallel ranks, the kind of device without an index."""
    max_seq_len: int
    num_pages: int
    attention_choice: AttentionChoice
    observers: list[StepObserver]
    """Are told of the phase ``compute``, if that happens in this process."""

    @property
    def local_engine(self) -> Engine | None:
        """The engine with its model, KV tensors and runner; None if there are several, in processes of their own."""
        ...

    def check(self) -> None:
        """Raise `EngineDead` if the executor can compute nothing any more, which an idle one does not say by itself."""
        ...

    def close(self) -> None:
        """End the executor's processes, if it has any. Calling it again does nothing."""
        ...


def build_executor(config: EngineConfig, path: Path) -> Executor:
    """The executor that ``config`` asks for: one engine here, or a process for each tensor-parallel rank.

    Raises:
        ConfigError: an option cannot work here.
        ModelLoadError: the checkpoint in ``path`` is not usable.
        EngineDead: a rank's process ended while it started.
    """
    return build_engine(config, path) if config.tensor_parallel_size == 1 else RemoteExecutor(config, path)


class EngineCore:
    """An input processor, a scheduler, an executor, and the loop that joins them. Not for several threads at once.

    Prepare requests with ``input_processor``, `add` them, and call `step` while `has_work`.

    Raises:
        ConfigError: an option is unknown or cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
        EngineDead: a rank's process ended while it started.
    """

    def __init__(self, config: EngineConfig) -> None:
        policies = Policies.named(config.queue_policy, config.batch_policy, config.admission_policy)
        make_cache = select_prefix_cache(config.prefix_cache, config.eviction_policy)
        make_store = resolve("page_store", config.page_store, PAGE_STORES)
        if config.tensor_parallel_size > 1 and config.page_store != "none":
            raise ConfigError(
                f"page_store: {config.page_store!r} copies pages of one device, and tensor_parallel_size is "
                f"{config.tensor_parallel_size}; use 'none'"
            )
        path = resolve_model(config.model)
        self.config = config
        self.tokenizer = Tokenizer(path)
        """Gives end-of-sequence ids and grammars what they need of the vocabulary; texts are encoded elsewhere."""
        self.executor = build_executor(config, path)
        choice = self.executor.attention_choice
        logger.info("attention backend %s: %s", choice.name, choice.reason)
        self.max_seq_len = self.executor.max_seq_len
        table = RunningTable(config.max_running_requests, self.max_seq_len)
        store = None if config.page_store == "none" else make_store(self.engine.kv_cache)
        memory = KVMemory(self.executor.num_pages, table, make_cache(config.page_size), store)
        self.input_processor = InputProcessor(
            config,
            self.tokenizer,
            vocab_size=self.executor.model_config.vocab_size,
            max_seq_len=self.max_seq_len,
            max_kv_tokens=self.executor.num_pages * config.page_size,
            max_stop_ids=table.max_stop_ids,
        )
        self.scheduler = Scheduler(
            table,
            memory,
            policies,
            max_prefill_tokens=config.max_prefill_tokens,
            max_queued_requests=config.max_queued_requests,
            make_masks=self.input_processor.grammars.masks,
        )
        overlap = self.executor.device.type == "cuda" if config.overlap is None else config.overlap
        self.loop = EngineLoop(self.scheduler, self.executor, depth=int(overlap))

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def engine(self) -> Engine:
        """The engine, with its model, KV tensors and runner, to look into.

        Raises:
            ConfigError: there are several, in processes of their own.
        """
        engine = self.executor.local_engine
        if engine is None:
            raise ConfigError(
                f"tensor_parallel_size: the {self.config.tensor_parallel_size} engines are in processes of their own; "
                "only that of a single rank can be looked into"
            )
        return engine

    @property
    def has_work(self) -> bool:
        """True while a request is unfinished, or a step is in flight."""
        return self.scheduler.has_work

    def add(self, request: Request) -> None:
        """Enqueue a request of the input processor's.

        Raises:
            QueueFull: too many requests are waiting.
        """
        self.scheduler.add(request)

    def finish(self, uid: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early; one that has ended is left alone. The next output reports it."""
        self.scheduler.finish(uid, reason)

    def step(self) -> StepOutput:
        """Run one step, if there is one to run, and return everything that became known since the last output.

        Raises:
            EngineDead: the executor computes nothing any more. All requests have ended with this error; `take_output`
                reports them.
        """
        try:
            return self.loop.step()
        except EngineDead as error:
            for uid in list(self.scheduler.requests):
                self.scheduler.finish(uid, FinishReason.ERROR, str(error))
            raise

    def take_output(self) -> StepOutput:
        """Everything that became known since the last output, without running a step."""
        return self.loop.take_output()

    def check(self) -> None:
        """Raise `EngineDead` if the engine can compute nothing any more, which an idle one does not say by itself."""
        self.executor.check()

    def close(self) -> None:
        """End the processes of a tensor-parallel engine. A single rank has none.

        This also happens when the object is collected as garbage, and when the program ends."""
        self.executor.close()

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Let ``observer`` follow every step inside the ``with`` block."""
        with observed(observer, self.loop.observers, self.executor.observers):
            yield

    @contextmanager
    def trace(self, limit: int | None = None) -> Iterator[Trace]:
        """Record every step inside the ``with`` block: what the host did when, what the device did, and for whom. What
        the devices of several ranks did is not seen from here.

        Args:
            limit: most events to keep, the newest ones; None keeps all.
        """
        engine = self.executor.local_engine
        trace = Trace(None if engine is None else engine.device, limit)
        with self.observe(TraceObserver(trace, self.scheduler.table)):
            yield trace
