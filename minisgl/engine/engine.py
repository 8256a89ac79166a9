"""The engine: a model, its KV memory and a sampler, ready to run one `Batch` after another."""

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
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import Logprobs, SampledTokens, token_logprobs
from minisgl.engine.sampling import HostSampling, SamplingTable
from minisgl.errors import EngineDead
from minisgl.layers.sharding import SINGLE_RANK, Communicator
from minisgl.models.config import ModelConfig


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


class Engine:
    """Computes steps. Told what to do by a `Batch`, and nothing else. `minisgl.engine.build.build_engine` makes one.

    Args:
        config: options.
        model_config: of the model.
        runner: computes steps, over all that they need.
        attention_choice: which attention backends the runner has, and why.
        page_bytes: bytes of a KV page over all layers.
        graph_bytes: what the runner's CUDA graphs were found to need; 0 if that was not measured.
        communicator: joins the ranks that share the model; each has an engine, and is told of every step.
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
        self.max_seq_len = runner.state.tokens.shape[1]
        self.model_bytes = parameter_bytes(runner.model)
        self.attention_choice = attention_choice
        self.page_bytes = page_bytes
        self.graph_bytes = graph_bytes
        self.sampling = SamplingTable(config.max_running_requests)
        self.closed = False
        self.observers: list[StepObserver] = []
        """Are told when a step is sent to the device, and when all of it has been sent."""

    def close(self) -> None:
        """Give the model's, the KV cache's and the graphs' memory back, so that another engine can be sized by it. May
        be called twice. While this engine lives, one that is built beside it gets a tenth of the device."""
        if self.closed:
            return
        self.closed = True
        del self.runner, self.model, self.kv_cache
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @property
    def local_engine(self) -> Engine:
        """This engine, which is in the process of those who drive it."""
        return self

    def check(self) -> None:
        """Nothing can end in this process without an exception."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> LaunchedStep:
        """Start a step: the model, the sampler, and an asynchronous copy of the tokens back to the host.

        Raises:
            EngineDead: the engine was closed.
        """
        if self.closed:
            raise EngineDead("the engine was closed; build a new one")
        for new in batch.new_requests:
            self.sampling.admit(new)
        sampling = self.sampling.rows(batch.slots[batch.sample_rows], batch.output_index)
        if len(batch.mask_rows):
            sampling = sampling.constrained(batch.mask_rows, batch.masks)
        with device_guard(self.device):
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


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def parameter_bytes(model: torch.nn.Module) -> int:
    """Bytes of all parameters."""
    return sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())


def device_guard(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which Triton launches and events are recorded wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
