"""The options of an engine: one immutable record, checked once."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from minisgl.errors import ConfigError

_MAX_RUNNING = 65536
_LONGEST_WAIT = 1e6
_NAMES = (
    "model",
    "device",
    "prefix_cache",
    "page_store",
    "attention_backend",
    "policy",
    "sampler",
    "fusions",
    "control_plane",
    "all_reduce",
)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of `minisgl.LLM` and of the server.

    Args:
        model: ``"default"`` (SmolLM2-135M-Instruct), a directory, or a Hugging Face hub id.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` …; ``"auto"`` takes CUDA where it is present.
        dtype: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``; ``"auto"`` is the checkpoint's own on
            CUDA and float32 on the CPU.
        kv_dtype: what keys and values are kept in: ``"auto"`` is the model's dtype; ``"fp8"`` is eight bits (e4m3), so
            that memory holds twice the tokens of bfloat16 and decoding reads half as much, for a loss of precision.
        max_seq_len: most tokens a request may have, prompt and output; None takes the model's own limit.
        max_running_requests: most requests that run at the same time (rows of a decode batch).
        max_queued_requests: most requests that wait; one more is refused with `QueueFull`.
        max_prefill_tokens: most prompt tokens that one step feeds; a longer prompt is prefilled in chunks. Decode rows
            of a mixed step come on top.
        page_size: tokens a KV page, a power of two from 1 to 256.
        num_pages: KV pages to allocate; None sizes the pool from memory.
        memory_ratio: share of memory to use, in (0, 1]; None is 0.9 on CUDA and 0.25 on the CPU, where other programs
            live too. What it is a share of depends on ``memory_formula``.
        memory_formula: ``"free"`` takes ``memory_ratio`` of the memory that was free before the model was loaded, less
            the model (mini-sglang's way); ``"peak"`` takes ``memory_ratio`` of the whole memory, less what is used
            at the peak of a warm-up run with the largest legal prefill (vLLM's way).
        prefix_cache: ``"radix"``, ``"block-hash"``, ``"none"``, or another registered name. The radix tree takes a
            second name, of an eviction policy: ``"radix,lru"`` is its default.
        page_store: where pages go that the prefix cache gives up: ``"none"``, or a registered name.
        attention_backend: ``"torch"``, ``"triton"``, ``"cascade"``, ``"flashinfer"`` or another registered name; two
            names ``"prefill,decode"`` share the work; ``"auto"`` takes what is fastest on the device, and
            `minisgl.LLM.attention_backend` says which and why.
        policy: names of an order (``fcfs``, ``lpm``), a composition (``prefill-first``, ``mixed``, ``static``) and an
            admission (``optimistic``, ``reserve``), in any order, separated by commas; the first of each is its
            default.
        sampler: ``"default"`` (plain PyTorch), ``"triton"`` (one fused kernel) or another registered name; ``"auto"``
            chooses by device.
        fusions: fused kernels to use: ``"auto"`` is all on CUDA and none on the CPU; ``"none"``; or some of ``norm``
            (residual + RMSNorm), ``rope`` (QK-norm + rotary embedding + KV store), ``activation`` (SiLU·mul),
            ``experts`` (a mixture's experts as grouped products; without it CUDA graphs cannot hold a mixture) and
            ``single-token`` (all of a decode step with one token), separated by commas.
        enforce_eager: launch every kernel of every step one by one, without CUDA graphs.
        max_graph_batch: most rows of a decode step that is replayed from a CUDA graph; larger ones run eagerly. None
            is ``max_running_requests``, up to 512.
        graph_batches: numbers of rows to capture; a step is padded to the next one. None chooses them up to
            ``max_graph_batch``.
        overlap: schedule and launch the next step while the device computes this one; False waits for each step. None
            is on where the device works asynchronously: CUDA. The tokens are the same.
        tensor_parallel_size: ranks that share the model, each on a GPU of its own, or as a process on the CPU.
        control_plane: how ranks are told of the next step: ``"shared-memory"``, ``"zmq"``, or another registered name.
        all_reduce: how ranks add up what they have computed: ``"torch"`` (NCCL between GPUs, gloo between CPU ranks),
            ``"ring"`` (sends and receives, between CPU ranks), ``"peer-memory"`` (between GPUs, kernels of our own for
            all but the largest tensors, which NCCL takes) or another registered name; ``"auto"`` is ``"peer-memory"``
            where GPUs reach one another's memory, and else ``"torch"``.
        distributed_timeout: seconds that a rank waits for another one in a collective, and the driver, ten more, for
            the ranks to complete a step, before the engine ends; so more than the longest step takes.
        verify_ranks: compare after every step what each rank was told and what it sampled, to find bugs.
        load_format: ``"auto"`` reads the checkpoint, ``"dummy"`` fills in random weights and needs no more than
            ``config.json``.
        seed: seed of dummy weights, and of requests that bring none of their own.
        request_timeout: seconds after which an unfinished request is ended with an error; None is never.
    """

    model: str = "default"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    max_seq_len: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 65536
    max_prefill_tokens: int = 8192
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float | None = None
    memory_formula: str = "free"
    prefix_cache: str = "radix"
    page_store: str = "none"
    attention_backend: str = "auto"
    policy: str = "fcfs,prefill-first,optimistic"
    sampler: str = "auto"
    fusions: str = "auto"
    enforce_eager: bool = False
    max_graph_batch: int | None = None
    graph_batches: tuple[int, ...] | None = None
    overlap: bool | None = None
    tensor_parallel_size: int = 1
    control_plane: str = "shared-memory"
    all_reduce: str = "auto"
    distributed_timeout: float = 300.0
    verify_ranks: bool = False
    load_format: str = "auto"
    seed: int = 0
    request_timeout: float | None = None

    def __post_init__(self) -> None:
        for name in ("max_running_requests", "max_queued_requests", "max_prefill_tokens", "tensor_parallel_size"):
            self._positive(name)
        for name in ("max_seq_len", "num_pages", "max_graph_batch"):
            if getattr(self, name) is not None:
                self._positive(name)
        if not _is_int(self.page_size) or not 1 <= self.page_size <= 256 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size: must be a power of two from 1 to 256, got {self.page_size!r}")
        if self.max_running_requests > _MAX_RUNNING:
            raise ConfigError(f"max_running_requests: must be at most {_MAX_RUNNING}, got {self.max_running_requests}")
        for name in _NAMES:
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: must be a string, got {getattr(self, name)!r}")
        if self.memory_ratio is not None and not (_is_number(self.memory_ratio) and 0.0 < self.memory_ratio <= 1.0):
            raise ConfigError(f"memory_ratio: must be in (0, 1], got {self.memory_ratio!r}")
        self._check_graph_batches()
        for name in ("enforce_eager", "verify_ranks"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}: must be True or False, got {getattr(self, name)!r}")
        if self.overlap is not None and not isinstance(self.overlap, bool):
            raise ConfigError(f"overlap: must be True, False or None, got {self.overlap!r}")
        if self.request_timeout is not None and not (_is_number(self.request_timeout) and self.request_timeout > 0.0):
            raise ConfigError(f"request_timeout: must be a positive number of seconds, got {self.request_timeout!r}")
        if not (_is_number(self.distributed_timeout) and 0.0 < self.distributed_timeout <= _LONGEST_WAIT):
            raise ConfigError(
                f"distributed_timeout: must be a positive number of seconds, at most {_LONGEST_WAIT:.0f}, got "
                f"{self.distributed_timeout!r}"
            )
        if not _is_int(self.seed) or not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed: must be an integer from 0 to 2**63 - 1, got {self.seed!r}")
        self._one_of("memory_formula", "free", "peak")
        self._one_of("load_format", "auto", "dummy")
        self._one_of("dtype", "auto", "float32", "bfloat16", "float16", "float64")
        self._one_of("kv_dtype", "auto", "fp8")

    @classmethod
    def from_options(cls, model: str, options: dict[str, Any]) -> EngineConfig:
        """Build from keyword arguments; an unknown one is a `ConfigError` that lists the known."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"{name}: unknown option; known options are {', '.join(sorted(known))}")
        return cls(model=model, **options)

    def _check_graph_batches(self) -> None:
        if self.graph_batches is None:
            return
        sizes = tuple(self.graph_batches)
        if not sizes or not all(_is_int(size) and size >= 1 for size in sizes):
            raise ConfigError(f"graph_batches: must be numbers of rows, at least 1 each, got {self.graph_batches!r}")
        if self.max_graph_batch is not None and max(sizes) != self.max_graph_batch:
            raise ConfigError(
                f"graph_batches: the largest is {max(sizes)} and max_graph_batch is {self.max_graph_batch}; give one"
            )

    def _positive(self, name: str) -> None:
        value = getattr(self, name)
        if not _is_int(value) or value < 1:
            raise ConfigError(f"{name}: must be an integer of at least 1, got {value!r}")

    def _one_of(self, name: str, *choices: str) -> None:
        if getattr(self, name) not in choices:
            raise ConfigError(f"{name}: must be one of {', '.join(choices)}, got {getattr(self, name)!r}")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
