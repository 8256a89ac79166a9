"""The engine without text: token ids go in, new tokens come out. `LLM` and the server both drive an `EngineCore`."""

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
from minisgl.drafters.protocol import DRAFTERS, Drafter, DraftTarget
from minisgl.engine.build import build_engine
from minisgl.engine.engine import Engine
from minisgl.engine.nvtx import NvtxObserver, check_nvtx
from minisgl.errors import ConfigError, EngineDead
from minisgl.input_processor import InputProcessor
from minisgl.kvcache.disk_store import DiskStore, check_directory
from minisgl.kvcache.host_store import HostStore, PageCopier, check_host_memory, slots_that_fit
from minisgl.kvcache.page_store import PAGE_STORES, PageStore
from minisgl.kvcache.prefix import select_prefix_cache
from minisgl.models.config import ModelConfig
from minisgl.models.hub import resolve_model
from minisgl.registry import build, resolve
from minisgl.request import FinishReason, Request
from minisgl.scheduler.loop import EngineLoop
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.mixed_memory import MixedMemory
from minisgl.scheduler.policy import Policies
from minisgl.scheduler.scheduler import Scheduler, StepOutput
from minisgl.scheduler.speculation import Speculation
from minisgl.table import RunningTable
from minisgl.tokenizer import Tokenizer
from minisgl.trace import Trace, TraceObserver, observed

logger = logging.getLogger(__name__)


class EngineCore:
    """An input processor, a scheduler, an executor, and the loop that joins them. Not thread-safe.

    Make requests with ``input_processor``, `add` them, and call `step` while `has_work`. ``executor`` computes the
    steps; None builds the one that ``config`` describes.

    Raises:
        ConfigError: an option is unknown or cannot work here.
        ModelLoadError: the checkpoint cannot be found or used.
        EngineDead: a rank's process ended while it started.
    """

    def __init__(self, config: EngineConfig, executor: Executor | None = None) -> None:
        policies = Policies.named(config.queue_policy, config.batch_policy, config.admission_policy)
        cache = select_prefix_cache(config.prefix_cache, config.eviction_policy)(config.page_size)
        if config.drafter != "none":
            resolve("drafter", config.drafter, DRAFTERS)  # a wrong name is told before the model is loaded
        resolve("page_store", config.page_store, PAGE_STORES)
        if config.tensor_parallel_size > 1 and config.page_store not in ("none", "host"):
            raise ConfigError(
                f"page_store: {config.page_store!r} copies pages of one device, and tensor_parallel_size is "
                f"{config.tensor_parallel_size}; use 'none' or 'host'"
            )
        if config.page_store == "host":
            check_host_memory(config.page_store_gib)
        if config.page_store == "disk":
            check_directory(config.page_store_path)
        if config.nvtx:
            check_nvtx()
        path = resolve_model(config.model)
        self.config = config
        self.tokenizer = Tokenizer(path)  # for end-of-sequence ids and grammars; text is encoded elsewhere
        self.executor = build_executor(config, path) if executor is None else executor
        choice = self.executor.attention_choice
        logger.info("attention backend %s: %s", choice.name, choice.reason)
        self.max_seq_len = self.executor.max_seq_len
        table = RunningTable(config.max_running_requests, self.max_seq_len)
        if self.executor.page_copier is not None:
            store: PageStore | None = HostStore(self.executor.page_copier)
        else:
            store = self._other_store()
        engine = self.executor.local_engine
        window = self.executor.model_config.longest_window
        if engine is not None and engine.hidden_states is not None:
            window = None  # the drafter looks up the hidden states of all positions by their pages
        drafts = 0 if config.drafter == "none" else config.num_draft_tokens
        mixed_window = self.executor.model_config.mixed_window
        num_pages, num_window_pages = self.executor.num_pages, self.executor.num_window_pages
        if num_window_pages is not None and mixed_window is not None:
            memory: KVMemory = MixedMemory(num_pages, num_window_pages, table, cache, mixed_window, drafts)
        else:
            memory = KVMemory(num_pages, table, cache, store, window, drafts)
        self.input_processor = InputProcessor(
            config,
            self.tokenizer,
            vocab_size=self.executor.model_config.vocab_size,
            max_seq_len=self.max_seq_len,
            max_kv_tokens=self.executor.num_pages * config.page_size,
            window=window,
            num_draft_tokens=drafts,
            max_stop_ids=table.max_stop_ids,
        )
        self.scheduler = Scheduler(
            table,
            memory,
            policies,
            max_prefill_tokens=config.max_prefill_tokens,
            max_queued_requests=config.max_queued_requests,
            make_masks=self.input_processor.grammars.masks,
            speculation=None if config.drafter == "none" else self._speculation(table),
        )
        overlap = self.executor.device.type == "cuda" if config.overlap is None else config.overlap
        self.loop = EngineLoop(self.scheduler, self.executor, depth=int(overlap))
        if config.nvtx:
            ranges = NvtxObserver()  # one for both, since "compute" lies within "launch"
            self.loop.observers.append(ranges)
            self.executor.observers.append(ranges)

    def _speculation(self, table: RunningTable) -> Speculation:
        engine, model = self.executor.local_engine, self.executor.model_config
        target = DraftTarget(
            self.config,
            model.vocab_size,
            model.hidden_size,
            self.max_seq_len,
            None if engine is None else engine.dtype,
            engine,
        )
        drafter = build("drafter", self.config.drafter, DRAFTERS, Drafter, target)
        return Speculation(table, drafter, self.config.num_draft_tokens, model.vocab_size)

    def __enter__(self) -> EngineCore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _other_store(self) -> PageStore | None:
        config = self.config
        if config.page_store == "disk":
            num_pages = slots_that_fit(config.page_store_gib, self.engine.page_bytes, 1)
            return DiskStore(self.engine.kv_cache, num_pages, config.page_store_path)
        if config.page_store == "none":
            return None
        return build("page_store", config.page_store, PAGE_STORES, PageStore, self.engine.kv_cache)

    @property
    def engine(self) -> Engine:
        """The engine with its model, KV tensors and runner. `ConfigError` if there are several, in other processes."""
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
        """Enqueue a request. Raises `QueueFull` if too many are waiting."""
        self.scheduler.add(request)

    def finish(self, uid: int, reason: FinishReason = FinishReason.ABORT) -> None:
        """End a request early, unless it has ended already. The next output reports it."""
        self.scheduler.finish(uid, reason)

    def step(self) -> StepOutput:
        """Run one step, if there is work, and return everything that became known since the last output.

        Raises `EngineDead` if the executor has died; all requests have then ended with it, for `take_output` to report.
        """
        try:
            return self.loop.step()
        except EngineDead as error:
            for uid in list(self.scheduler.requests):
                self.scheduler.finish(uid, FinishReason.ERROR, str(error))
            raise

    def take_output(self) -> StepOutput:
        """Return everything that became known since the last output, without running a step."""
        return self.loop.take_output()

    def check(self) -> None:
        """Raise `EngineDead` if a rank has ended; an idle engine would not notice."""
        self.executor.check()

    def close(self) -> None:
        """End the ranks' processes, if there are any. Also happens at garbage collection and at exit."""
        if self.scheduler.speculation is not None:
            self.scheduler.speculation.close()
        self.executor.close()

    @contextmanager
    def observe(self, observer: StepObserver) -> Iterator[None]:
        """Let ``observer`` follow every step inside the ``with`` block."""
        with observed(observer, self.loop.observers, self.executor.observers):
            yield

    @contextmanager
    def trace(self, limit: int | None = None) -> Iterator[Trace]:
        """Record every step inside the ``with`` block: what the host and the device did, when, and for which requests.

        With several ranks, only the host is recorded. ``limit`` is the most events to keep, the newest ones.
        """
        engine = self.executor.local_engine
        trace = Trace(None if engine is None else engine.device, limit)
        with self.observe(TraceObserver(trace, self.scheduler.table)):
            yield trace


class Executor(StepLauncher, Protocol):
    """Computes the steps of an engine: an `Engine` in this process, or a `RemoteExecutor` over the ranks' processes."""

    model_config: ModelConfig
    device: torch.device  # of tensor-parallel ranks, the kind of device without an index
    max_seq_len: int
    num_pages: int
    num_window_pages: int | None  # of layers with a sliding window, where they have pages of their own
    attention_choice: AttentionChoice
    observers: list[StepObserver]  # are told of the phase "compute", if this process computes

    @property
    def local_engine(self) -> Engine | None:
        """The engine with its model, KV tensors and runner; None if the ranks are other processes."""
        ...

    @property
    def page_copier(self) -> PageCopier | None:
        """What copies evicted pages, for ``page_store="host"``."""
        ...

    def check(self) -> None:
        """Raise `EngineDead` if a rank has ended; an idle engine would not notice."""
        ...

    def close(self) -> None:
        """End the executor's processes, if it has any. May be called twice."""
        ...


def build_executor(config: EngineConfig, path: Path) -> Executor:
    """Build one engine in this process, or start a process for each tensor-parallel rank."""
    return build_engine(config, path) if config.tensor_parallel_size == 1 else RemoteExecutor(config, path)
