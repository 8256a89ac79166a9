"""The engine: a model, its KV memory and a sampler, ready to run one `Batch` after another."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy.typing as npt
import torch

from minisgl.core.attention import AttentionBackend, AttentionChoice
from minisgl.core.batch import Batch, StepObserver, StepResult
from minisgl.core.communicator import ALONE, Communicator
from minisgl.core.config import EngineConfig
from minisgl.core.registry import resolve
from minisgl.engine.budget import check_num_pages, pages_that_fit
from minisgl.engine.device_state import DeviceState
from minisgl.engine.logprobs import Logprobs, token_logprobs
from minisgl.engine.ranks import check_balance, gather
from minisgl.engine.runner import EagerRunners, EngineParts, RunnerFactory
from minisgl.engine.sampler import SAMPLERS, SampledTokens
from minisgl.engine.sampling_stages import SamplingRows
from minisgl.engine.sampling_table import SamplingTable
from minisgl.engine.warm_up import warm_up
from minisgl.errors import ConfigError
from minisgl.kvcache.kv_cache import KVCache
from minisgl.kvcache.sizing import free_memory, page_bytes
from minisgl.layers import divide_kv_heads
from minisgl.models import ModelConfig, block_weights, load_model

_INT32_LIMIT = 2**31
_FP8_CAPABILITY = (8, 9)


@dataclass(slots=True)
class PendingStep:
    """A launched step whose results are on their way to the host."""

    rows: SamplingRows
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
        return StepResult(tokens, token_logprobs(self.rows, tokens, logprobs))


class Engine:
    """Computes steps. Told what to do by a `Batch`, and nothing else.

    Construction follows what each part needs of the ones before:

    1. device and dtype, from the options and the checkpoint;
    2. the memory that is free now, since formula A takes its share of that; ranks compare theirs;
    3. the model, built on the meta device and filled from the checkpoint, on the CPU then laid out for its kernels:
       formula A subtracts its size, formula B warms it up with the largest legal prefill;
    4. the number of KV pages, from these, and the KV tensors; of several ranks, the one with fewest pages decides;
    5. token and page tables, whose padding points to the page after the last;
    6. the attention backend, which reads the KV tensors;
    7. the sampler;
    8. the runner, which may record all of these in CUDA graphs. The memory that it will need is measured before step
       4, by a trial over a KV cache of one page;
    9. on CUDA, steps on the dummy page, in which kernels are compiled and chosen before the first request.

    Args:
        config: options.
        path: directory of the checkpoint.
        model_config: of the model in it.
        make_attention: builds the backend over the KV cache.
        prepare_model: called with the loaded model, in which it may exchange modules for faster ones.
        runners: build what computes the steps.
        communicator: joins the ranks that share the model; each builds an engine, and is told of every step.
        describe_attention: says which backend ``make_attention`` builds, and why.

    Raises:
        ConfigError: the device is missing, a size is more than it or the model has, or no KV page fits.
        ModelLoadError: the checkpoint is not usable.
    """

    def __init__(
        self,
        config: EngineConfig,
        path: Path,
        model_config: ModelConfig,
        make_attention: Callable[[KVCache], AttentionBackend],
        prepare_model: Callable[[torch.nn.Module], None] | None = None,
        runners: RunnerFactory | None = None,
        communicator: Communicator = ALONE,
        describe_attention: Callable[[KVCache], AttentionChoice] | None = None,
    ) -> None:
        self.config = config
        self.model_config = model_config
        self.communicator = communicator
        self.device = resolve_device(config.device)
        self.dtype = resolve_dtype(config.dtype, model_config.dtype, self.device)
        self.kv_dtype = resolve_kv_dtype(config.kv_dtype, self.dtype, self.device)
        self.max_seq_len = longest_sequence(config, model_config.max_position_embeddings)
        make_sampler = resolve("sampler", config.sampler, SAMPLERS)
        if self.device.type == "cuda":  # what is gone may linger in a cycle, its memory in PyTorch's cache
            gc.collect()
            torch.cuda.empty_cache()
        free_before = free_memory(self.device)
        check_balance(free_before, communicator, self.device)

        how = (config.load_format, config.seed, communicator)
        self.model = load_model(path, model_config, self.dtype, self.device, *how)
        if self.device.type == "cpu":
            block_weights(self.model)
        if prepare_model is not None:
            prepare_model(self.model)
        self.model_bytes = sum(p.numel() * p.element_size() for p in self.model.parameters())
        self.sampling = SamplingTable(config.max_running_requests)
        sampler = make_sampler()

        kv_heads = divide_kv_heads(model_config.num_kv_heads, communicator).size
        shape = (model_config.num_layers, kv_heads, model_config.head_dim)
        self.page_bytes = page_bytes(*shape, config.page_size, self.kv_dtype.itemsize)

        def parts(num_pages: int) -> EngineParts:
            kv_cache = KVCache(*shape, num_pages, config.page_size, self.dtype, self.device, self.kv_dtype)
            sizes = (config.max_running_requests, self.max_seq_len, config.page_size, num_pages)
            state = DeviceState(*sizes, self.device)
            return EngineParts(self.model, kv_cache, make_attention(kv_cache), state, sampler)

        runners = runners or EagerRunners()
        self.runner_bytes = 0
        if config.num_pages is None:
            self.runner_bytes = runners.memory(parts(num_pages=1))
        pages = config.num_pages or pages_that_fit(
            config,
            self.model,
            self.model_bytes,
            self.runner_bytes,
            free_before,
            self.max_seq_len,
            self.page_bytes,
            self.device,
            communicator.size,
        )
        self.num_pages = min(gather(pages, communicator, self.device))
        check_num_pages(self.num_pages, config.page_size, self.page_bytes, self.device)
        self.parts = parts(self.num_pages)
        name = type(self.parts.attention).__name__
        given = AttentionChoice(name, name, "the engine was built with it")
        self.attention_choice = describe_attention(self.kv_cache) if describe_attention else given
        self.observers: list[StepObserver] = []
        """Are told when a step is sent to the device, and when all of it has been sent."""
        self.runner = runners.build(self.parts)
        if self.device.type == "cuda":
            warm_up(self.parts, config.max_prefill_tokens)

    @property
    def kv_cache(self) -> KVCache:
        return self.parts.kv_cache

    @property
    def local_engine(self) -> Engine:
        """This engine, which is in the process of those who drive it."""
        return self

    def check(self) -> None:
        """Nothing can end in this process without an exception."""

    def close(self) -> None:
        """Nothing has to be ended: memory is freed with the object."""

    @torch.inference_mode()
    def launch(self, batch: Batch) -> PendingStep:
        """Start a step: the model, the sampler, and an asynchronous copy of the tokens back to the host."""
        for new in batch.new_requests:
            self.sampling.admit(new)
        rows = self.sampling.rows(batch.slots[batch.sample_rows], batch.output_index)
        if len(batch.mask_rows):
            rows = rows.constrained(batch.mask_rows, batch.masks)
        with current(self.device):
            for observer in self.observers:
                observer.begin("compute", batch)
            sampled = self.runner.run(batch, rows)
            for observer in self.observers:
                observer.end("compute", batch)
            return self._send_back(rows, sampled)

    def _send_back(self, rows: SamplingRows, sampled: SampledTokens) -> PendingStep:
        if self.device.type != "cuda":  # a copy here as well: the next step may write its tokens to the same place
            return PendingStep(rows, sampled.tokens.clone(), sampled.logprobs, None)
        tokens = _to_pinned(sampled.tokens)
        logprobs = None if sampled.logprobs is None else Logprobs(*map(_to_pinned, sampled.logprobs))
        arrived = torch.cuda.Event()
        arrived.record()
        return PendingStep(rows, tokens, logprobs, arrived)


def _to_pinned(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU the current one, on which Triton launches and events are recorded wherever the tensors are."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def longest_sequence(config: EngineConfig, model_limit: int) -> int:
    """``max_seq_len``, or what the model's positions and the int32 indices of the token table allow."""
    indexable = (_INT32_LIMIT - 1) // (config.max_running_requests + 1)
    wanted = config.max_seq_len
    if wanted is None:
        return min(model_limit, indexable)
    if wanted > model_limit:
        raise ConfigError(f"max_seq_len: the model has {model_limit} positions, got {wanted}; lower it")
    if wanted > indexable:
        raise ConfigError(
            f"max_seq_len: {wanted} tokens for {config.max_running_requests} max_running_requests are more than an "
            f"int32 can index; lower one of them (at most {indexable} tokens)"
        )
    return wanted


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``"auto"`` is CUDA where it is present, else the CPU.

    Raises:
        ConfigError: no such device here.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: {name!r} is not a device; use 'cpu', 'cuda', 'cuda:N' or 'auto'") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: {name!r} is not supported; use 'cpu', 'cuda', 'cuda:N' or 'auto'")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: {name!r} is not present ({torch.cuda.device_count()} CUDA devices); use 'cpu'")
    return device


def resolve_dtype(name: str, checkpoint: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype called ``name``; ``"auto"`` is the checkpoint's on CUDA and float32 on the CPU, which computes
    half-width floats slowly or not at all."""
    if name == "auto":
        return checkpoint if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV memory called ``name``; ``"auto"`` is the model's.

    Raises:
        ConfigError: this GPU has no instructions for 8-bit floats.
    """
    if name == "auto":
        return dtype
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
        needed, found = (".".join(map(str, version)) for version in (_FP8_CAPABILITY, capability))
        raise ConfigError(
            f"kv_dtype: 'fp8' needs a GPU of compute capability {needed} or later, this has {found}; use 'auto'"
        )
    return torch.float8_e4m3fn
