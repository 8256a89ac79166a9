"""The options of an engine, checked on construction."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from minisgl.errors import ConfigError

_MAX_RUNNING = 65536
_LONGEST_WAIT = 1e6
_MOST_GIB = 1e5
_STRINGS = (
    "model",
    "device",
    "architecture",
    "quantization",
    "prefix_cache",
    "eviction_policy",
    "page_store",
    "prefill_attention",
    "decode_attention",
    "queue_policy",
    "batch_policy",
    "admission_policy",
    "sampler",
    "drafter",
    "control_plane",
    "all_reduce",
)
_MAX_DRAFT = 64


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All options of `minisgl.llm.LLM` and of the server.

    An option that selects an implementation takes a name, or the ``"module:Class"`` of your own, which
    ``tests/contracts`` can test.

    Args:
        model: ``"default"`` (SmolLM2-135M-Instruct), a directory, or a Hugging Face hub id.
        architecture: class name in transformers, or ``"module:Class"``; ``"auto"`` takes it from ``config.json``.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"`` …; ``"auto"`` is CUDA where there is a GPU, else the CPU.
        dtype: of the model: ``"float32"``, ``"bfloat16"``, ``"float16"`` or ``"float64"``; ``"auto"`` is the
            checkpoint's on CUDA and float32 on the CPU.
        kv_dtype: of keys and values: ``"auto"`` is the model's; ``"fp8"`` (e4m3) takes half the memory of bfloat16 and
            is less precise.
        quantization: of the weights of linear layers: ``"none"``, ``"fp8"`` (e4m3, a scale a row), ``"fp8-block"`` (a
            scale for 128 × 128 weights), ``"int4"`` or ``"int4-zero-point"`` (a scale, or also a zero point, for 128),
            or ``"int8"`` (with embedding and LM head; for the CPU). ``"auto"`` is what the checkpoint declares. Plain
            checkpoints and dummy weights are quantised while they are loaded; ``"none"`` dequantises a quantised one.
            With ``"fp8-block"`` activations stay as they are, even if a checkpoint declares ``activation_scheme``
            ``dynamic``.
        max_seq_len: most tokens of a request, prompt and output together; None is the model's own limit.
        max_running_requests: most requests that run at the same time, which is the most rows of a decode batch.
        max_queued_requests: most requests that wait; the next one is refused with `QueueFull`.
        max_prefill_tokens: most prompt tokens of a step, without decode rows; longer prompts are prefilled in chunks.
        page_size: tokens in a KV page, a power of two from 1 to 256.
        num_pages: KV pages to allocate; None is as many as ``memory_ratio`` allows. Where only some layers have a
            sliding window, these get a smaller number of window pages: the fewer, the longer ``max_seq_len`` is.
        memory_ratio: share of the memory to use, above 0 and at most 1; None is 0.9 on CUDA and 0.25 on the CPU.
        memory_formula: what ``memory_ratio`` is a share of. ``"free"``: the memory that was free before the model was
            loaded; the model is subtracted (as in mini-sglang). ``"peak"``: all memory; the peak of a warm-up with the
            largest legal prefill is subtracted (as in vLLM).
        prefix_cache: how computed prefixes are found again: ``"radix"``, ``"block-hash"`` or ``"none"``.
        eviction_policy: which cached pages are evicted first (``"radix"``); ``"lru"`` is the least recently used.
        page_store: where pages go that the prefix cache evicts: ``"host"`` copies them to host memory, and back when a
            prompt wants them again; ``"disk"`` writes them to files, which is slower and for one rank; ``"none"`` drops
            them. With a store, layers with a sliding window have no pages of their own.
        page_store_gib: GiB for evicted pages, of all ranks together. Host memory is pinned on CUDA.
        page_store_path: directory for ``page_store="disk"``; None is the system's place for temporary files.
        prefill_attention: attention backend for prefill rows: ``"torch"``, ``"triton"``, ``"cascade"``,
            ``"flashinfer"``, ``"flashinfer-fa2"`` or ``"flashinfer-fa3"``; ``"auto"`` is the fastest on the device,
            which `minisgl.llm.LLM.attention_backend` explains.
        decode_attention: the same for decode rows.
        queue_policy: which waiting request comes first: ``"fcfs"`` (arrival) or ``"lpm"`` (longest cached prefix).
        batch_policy: what a step is made of: ``"prefill-first"`` (prefill or decode), ``"mixed"`` (both) or
            ``"static"`` (no new request before all running ones are finished).
        admission_policy: when a request may start: ``"optimistic"`` (its tokens fit now; running requests may be
            preempted later) or ``"reserve"`` (all running requests fit to their end).
        sampler: ``"default"`` (plain PyTorch), ``"triton"`` (one fused kernel) or ``"compile"`` (torch.compile);
            ``"auto"`` is ``"compile"`` if ``fusions`` has it, else ``"triton"`` on CUDA.
        fusions: fused kernels to use: ``norm`` (residual + RMSNorm), ``rope`` (QK-norm + rotary embedding + KV store),
            ``activation`` (SiLU·mul), ``experts`` (grouped products; without them, CUDA graphs cannot hold a mixture of
            experts), ``single-token`` (a whole decode step with one token) and ``persistent`` (the same with one kernel
            for all layers, where model and GPU allow). None is all of these on CUDA and none on the CPU. ``compile``
            lets torch.compile fuse the norms, rotations and activations that the others leave.
        enforce_eager: launch every kernel of every step one by one, without CUDA graphs.
        max_graph_batch: most rows of a decode step that is replayed from a CUDA graph; larger steps run eagerly. None
            is ``max_running_requests``, up to 512.
        graph_batches: numbers of rows to capture; a step is padded to the next. None chooses up to ``max_graph_batch``.
        max_graph_tokens: most tokens of a prefill or mixed step that is replayed from a CUDA graph; larger steps run
            eagerly, and with 0 all do. None is ``max_prefill_tokens``, up to 8,192.
        overlap: schedule and launch the next step while the device computes this one. None is True on CUDA, which works
            asynchronously, and False on the CPU. The tokens are the same.
        drafter: guesses the next tokens of a request, which one step then verifies (speculative decoding); the answers
            are the same. ``"ngram"`` (what followed the last tokens where they occurred before), ``"suffix"`` (the
            same for any length of match, and in earlier answers too), ``"model"`` (what a smaller model says),
            ``"eagle"`` (a head that was trained on the model's hidden states) or ``"none"``. ``"model"`` and
            ``"eagle"`` work with one rank only, and are refused with several.
        draft_model: what ``"model"`` or ``"eagle"`` draft with, named like ``model``: a model with the same vocabulary,
            or an EAGLE-3 checkpoint for this model. None is the head of the default model.
        num_draft_tokens: most tokens to draft for a request in a step, from 1 to 64; a request can ask for fewer.
        tensor_parallel_size: ranks that share the model, each on its own GPU, or as a process on the CPU.
        control_plane: how the driver sends steps to the ranks: ``"shared-memory"`` or ``"zmq"``.
        all_reduce: how ranks add up partial results: ``"torch"`` (NCCL between GPUs, gloo on the CPU), ``"ring"`` (on
            the CPU) or ``"peer-memory"`` (our kernels between GPUs, NCCL for the largest tensors). ``"auto"`` is
            ``"peer-memory"`` where GPUs can access one another's memory, else ``"torch"``.
        distributed_timeout: seconds that a rank waits for another in a collective before the engine ends; the driver
            waits ten more. Must exceed the longest step.
        hang_timeout: seconds without an answer after which a process (a rank, or one of the server's) is killed, at
            least 1; None is never. A step may take longer: ``distributed_timeout``.
        nvtx: push named ranges around the phases of every step and around layers, for ``nsys profile``; layers show in
            eager steps only. Needs a CUDA build of PyTorch.
        verify_ranks: compare after every step what each rank received and sampled, to find bugs.
        load_format: ``"auto"`` reads the checkpoint; ``"dummy"`` makes random weights and needs only ``config.json``.
        seed: of dummy weights, and of requests that give none; from 0 to 2**63 - 1.
        request_timeout: seconds after which an unfinished request ends with an error; None is never.

    Raises:
        ConfigError: a value is out of range or of the wrong type.
    """

    model: str = "default"
    architecture: str = "auto"
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    quantization: str = "auto"
    max_seq_len: int | None = None
    max_running_requests: int = 256
    max_queued_requests: int = 65536
    max_prefill_tokens: int = 8192
    page_size: int = 16
    num_pages: int | None = None
    memory_ratio: float | None = None
    memory_formula: str = "free"
    prefix_cache: str = "radix"
    eviction_policy: str = "lru"
    page_store: str = "none"
    page_store_gib: float = 4.0
    page_store_path: str | None = None
    prefill_attention: str = "auto"
    decode_attention: str = "auto"
    queue_policy: str = "fcfs"
    batch_policy: str = "prefill-first"
    admission_policy: str = "optimistic"
    sampler: str = "auto"
    fusions: tuple[str, ...] | None = None
    enforce_eager: bool = False
    max_graph_batch: int | None = None
    graph_batches: tuple[int, ...] | None = None
    max_graph_tokens: int | None = None
    overlap: bool | None = None
    drafter: str = "none"
    draft_model: str | None = None
    num_draft_tokens: int = 4
    tensor_parallel_size: int = 1
    control_plane: str = "shared-memory"
    all_reduce: str = "auto"
    distributed_timeout: float = 300.0
    hang_timeout: float | None = 30.0
    nvtx: bool = False
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
        tokens = self.max_graph_tokens
        if tokens is not None and not (_is_int(tokens) and tokens >= 0):
            raise ConfigError(f"max_graph_tokens: must be None or an integer of at least 0, got {tokens!r}")
        if not _is_int(self.page_size) or not 1 <= self.page_size <= 256 or self.page_size & (self.page_size - 1):
            raise ConfigError(f"page_size: must be a power of two from 1 to 256, got {self.page_size!r}")
        if not _is_int(self.num_draft_tokens) or not 1 <= self.num_draft_tokens <= _MAX_DRAFT:
            raise ConfigError(
                f"num_draft_tokens: must be an integer from 1 to {_MAX_DRAFT}, got {self.num_draft_tokens!r}"
            )
        if self.max_running_requests > _MAX_RUNNING:
            raise ConfigError(f"max_running_requests: must be at most {_MAX_RUNNING}, got {self.max_running_requests}")
        for name in _STRINGS:
            if not isinstance(getattr(self, name), str):
                raise ConfigError(f"{name}: must be a string, got {getattr(self, name)!r}")
        if self.memory_ratio is not None and not (_is_number(self.memory_ratio) and 0.0 < self.memory_ratio <= 1.0):
            raise ConfigError(f"memory_ratio: must be in (0, 1], got {self.memory_ratio!r}")
        if not (_is_number(self.page_store_gib) and 0.0 < self.page_store_gib <= _MOST_GIB):
            raise ConfigError(
                f"page_store_gib: must be a positive number of GiB, at most {_MOST_GIB:g}, got {self.page_store_gib!r}"
            )
        if self.draft_model is not None and not isinstance(self.draft_model, str):
            raise ConfigError(f"draft_model: must be a model's name or None, got {self.draft_model!r}")
        if self.page_store_path is not None and not isinstance(self.page_store_path, str):
            raise ConfigError(f"page_store_path: must be a directory's name or None, got {self.page_store_path!r}")
        self._check_fusions()
        self._check_graph_batches()
        for name in ("enforce_eager", "nvtx", "verify_ranks"):
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
        if self.hang_timeout is not None and not (
            _is_number(self.hang_timeout) and 1.0 <= self.hang_timeout <= _LONGEST_WAIT
        ):
            raise ConfigError(
                f"hang_timeout: must be None or a number of seconds from 1 to {_LONGEST_WAIT:.0f}, got "
                f"{self.hang_timeout!r}"
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

    def _check_fusions(self) -> None:
        names = self.fusions
        if names is not None and not (
            isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
        ):
            raise ConfigError(f"fusions: must be a tuple of names, such as ('norm', 'rope'), or None, got {names!r}")

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
