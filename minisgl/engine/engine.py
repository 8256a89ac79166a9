"""The engine of one rank: launches one `Batch` after another and brings the sampled tokens back to the host."""

from __future__ import annotations

import gc
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch

from minisgl.batch import Batch, StepObserver, StepResult
from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.engine.hidden_states import HiddenStates
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import Logprobs, SampledTokens, token_logprobs
from minisgl.engine.sampling import HostSampling, SamplingTable
from minisgl.errors import EngineDead
from minisgl.kvcache.host_store import HostPages
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig


class Engine:
    """Computes the steps that it is told to, and nothing else. `minisgl.engine.build.build_engine` makes one.

    ``page_bytes`` counts a KV page over all layers; ``graph_bytes`` is the measured need of the CUDA graphs, or 0. The
    ranks that share a model by a ``communicator`` each have an engine, and each is told of every step. ``page_copier``
    is the host memory for evicted pages, if there is any, and ``hidden_states`` what a drafter reads.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        runner: ModelRunner,
        attention_choice: AttentionChoice,
        page_bytes: int,
        graph_bytes: int = 0,
        communicator: Communicator = SINGLE_RANK,
        page_copier: HostPages | None = None,
        hidden_states: HiddenStates | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.runner = runner
        self.communicator = communicator
        self.device = runner.device
        self.dtype = runner.kv_cache.dtype
        self.model = runner.model
        self.kv_cache = runner.kv_cache
        self.num_pages = runner.kv_cache.num_pages
        self.num_window_pages = runner.kv_cache.num_window_pages
        self.max_seq_len = runner.state.tokens.shape[1]
        self.model_bytes = parameter_bytes(runner.model)
        self.attention_choice = attention_choice
        self.page_bytes = page_bytes
        self.graph_bytes = graph_bytes
        self.page_copier = page_copier
        self.hidden_states = hidden_states
        self.sampling = SamplingTable(config.max_running_requests)
        self.closed = False
        self.observers: list[StepObserver] = []  # follow the phase "compute": sending a step to the device

    def close(self) -> None:
        """Free the memory of the model, the KV cache and the graphs, so that another engine can use it; idempotent."""
        if self.closed:
            return
        self.closed = True
        del self.runner, self.model, self.kv_cache, self.hidden_states
        if self.page_copier is not None:
            self.page_copier.close()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def local_engine(self) -> Engine:
        """This engine: no other process computes its steps."""
        return self

    def check(self) -> None:
        """Do nothing: in this process, every failure is an exception."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step: model, sampler, asynchronous copy of the tokens to the host. `EngineDead` once closed."""
        if self.closed:
            raise EngineDead("the engine was closed; build a new one")
        if batch.new_requests:
            self.sampling.admit(*batch.new_requests)
        sampling = self.sampling.rows(batch.slots[batch.sample_rows], batch.output_index)
        if len(batch.mask_rows):
            sampling = sampling.constrained(batch.mask_rows, batch.masks)
        with device_guard(self.device):
            if self.page_copier is not None and len(batch.page_moves):
                self.page_copier.run(batch.page_moves)
            for observer in self.observers:
                observer.begin("compute", batch)
            sampled = self.runner.run(batch, sampling)
            for observer in self.observers:
                observer.end("compute", batch)
            return self._send_back(sampling, sampled)

    def _send_back(self, sampling: HostSampling, sampled: SampledTokens) -> LaunchedStep:
        if self.device.type != "cuda":  # a copy here as well: the next step may write its tokens to the same place
            return LaunchedStep(sampling, sampled.tokens.clone(), sampled.logprobs, None)
        tokens = _to_pinned(sampled.tokens)
        logprobs = None if sampled.logprobs is None else Logprobs(*map(_to_pinned, sampled.logprobs))
        arrived = torch.cuda.Event()
        arrived.record()
        return LaunchedStep(sampling, tokens, logprobs, arrived)


@dataclass(slots=True)
class LaunchedStep:
    """A launched step whose results are on their way to the host."""

    sampling: HostSampling
    tokens: torch.Tensor
    logprobs: Logprobs[torch.Tensor] | None
    arrived: torch.cuda.Event | None

    def done(self) -> bool:
        """Whether `wait` would return at once."""
        return self.arrived is None or self.arrived.query()

    def wait(self) -> StepResult:
        """Block until the copies have arrived; on the CPU there is nothing to wait for."""
        if self.arrived is not None:
            self.arrived.synchronize()
        tokens = self.tokens.numpy()
        logprobs: Logprobs[npt.NDArray[Any]] | None = None
        if self.logprobs is not None:
            logprobs = Logprobs(*(part.numpy() for part in self.logprobs))
        return StepResult(tokens, token_logprobs(self.sampling, tokens, logprobs))


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current device, where Triton launches and events are recorded whatever the tensors' device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
