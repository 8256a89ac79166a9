"""Build one rank's engine from its parts, each after the parts that it needs."""

from __future__ import annotations

import gc
import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import torch

from minisgl.attention.select import attention_choice, select_backend
from minisgl.config import EngineConfig
from minisgl.drafters.protocol import hidden_layers
from minisgl.engine.cuda_graph import (
    CpuGraph,
    CudaGraphCapture,
    CudaGraphRunner,
    GraphCapture,
    build_runner,
    measure_graph_memory,
    run_once,
    single_row_decoder,
    sizes_to_capture,
)
from minisgl.engine.device_state import DeviceState
from minisgl.engine.engine import Engine, device_guard, parameter_bytes
from minisgl.engine.hidden_states import HiddenStates
from minisgl.engine.memory import (
    all_gather_int,
    can_split_windows,
    check_memory_balance,
    check_num_pages,
    compile_prefill_kernels,
    longest_sequence,
    pages_that_fit,
    split_pages,
    warm_up_kernels,
)
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.nvtx import add_layer_ranges
from minisgl.engine.prefill_graph import (
    PrefillGraphRunner,
    build_prefill_runner,
    measure_prefill_memory,
    mixes,
    tokens_to_capture,
)
from minisgl.engine.sampler import SAMPLERS, Sampler
from minisgl.engine.verify_graph import build_verify_runner, measure_verify_memory
from minisgl.errors import ConfigError, NotEnoughMemory
from minisgl.kernels import has_triton
from minisgl.kvcache.host_store import STAGING_PAGES, HostPages, slots_that_fit
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.sizing import MixedLayers, PageSplit, free_memory, page_bytes, total_memory
from minisgl.layers.quantization import check_device
from minisgl.layers.sharding import SINGLE_RANK, Communicator, divide_kv_heads
from minisgl.models.config import ModelConfig
from minisgl.models.decoder import prepack_weights
from minisgl.models.fusions import compile_layers, fuse_layers, select_fusions
from minisgl.models.loader import load_model
from minisgl.registry import build

logger = logging.getLogger(__name__)


def build_engine(
    config: EngineConfig,
    path: Path,
    communicator: Communicator = SINGLE_RANK,
    split_windows: bool = True,
    model_config: ModelConfig | None = None,
) -> Engine:
    """Build the engine that ``config`` describes, on this rank, from the checkpoint in directory ``path``.

    Where it can, it gives layers with a sliding window pages of their own (`can_split_windows`), unless the caller, who
    then has to keep two page tables, says no by ``split_windows``. ``model_config`` is the checkpoint's, if it has been
    read already.

    1. Device, dtypes and implementations, from the options and the checkpoint.
    2. Measure the memory that is free now, since formula A takes its share of that; ranks compare theirs.
    3. The model: built on the meta device, filled from the checkpoint, laid out for the CPU or fused.
    4. On CUDA, compile kernels, many at once, and measure the memory that CUDA graphs will need, by a trial; both over
       a KV cache of one page.
    5. The number of KV pages, from all of these; the rank with the fewest pages decides for all.
    6. KV cache, device tables, and the attention backend, which reads the KV cache.
    7. The runner, which may capture all of these in CUDA graphs.
    8. On CUDA, warm-up steps on the dummy page, so that kernels are compiled before the first request.
    9. Host memory for evicted pages, if ``page_store`` asks for it; pinning takes about a second for 4 GB.

    Raises `ConfigError` if the device is missing, a size is too large for it or the model, or no KV page fits, and
    `ModelLoadError` if the checkpoint is not usable.
    """
    device = rank_device(config, communicator.rank)
    with device_guard(device):
        model_config = model_config or ModelConfig.from_dir(path, config.architecture)
        return _build(config, path, model_config, communicator, device, split_windows)


def _build(
    config: EngineConfig,
    path: Path,
    model_config: ModelConfig,
    communicator: Communicator,
    device: torch.device,
    split_windows: bool,
) -> Engine:
    fusions = select_fusions(config.fusions, device)
    config = replace(config, device=str(device), sampler=select_sampler(config.sampler, device, fusions))
    dtype = resolve_dtype(config.dtype, model_config.dtype, device)
    kv_dtype = resolve_kv_dtype(config.kv_dtype, dtype, device)
    max_seq_len = longest_sequence(config, model_config.max_position_embeddings)
    model_config = model_config.for_sequences(max_seq_len)
    sampler = build("sampler", config.sampler, SAMPLERS, Sampler)
    make_attention = select_backend(config.prefill_attention, config.decode_attention, model_config.attention_features)

    if device.type == "cuda":  # free closed engines in reference cycles, and PyTorch's cache
        gc.collect()
        torch.cuda.empty_cache()
        if config.num_pages is None:
            warn_if_occupied(torch.cuda.memory_allocated(device), total_memory(device))
    free_before = free_memory(device)
    if device.type == "cuda":  # ranks on a CPU share one memory
        check_memory_balance(free_before, communicator, device)

    model = load_model(
        path,
        model_config,
        dtype,
        device,
        load_format=config.load_format,
        seed=config.seed,
        communicator=communicator,
        quantization=config.quantization,
    )
    if device.type == "cpu":
        prepack_weights(model)
    fuse_layers(model, fusions)
    if "compile" in fusions:
        compile_layers(model)
    if config.nvtx:
        add_layer_ranges(model)
    kv_heads = divide_kv_heads(model_config.num_kv_heads, communicator).size

    layers_read = hidden_layers(config, model_config.num_layers)
    windowed = [window is not None for window in model_config.sliding_windows]
    split_windows = split_windows and not layers_read and can_split_windows(config, model_config)

    def make_runner(num_pages: int, num_window_pages: int) -> ModelRunner:
        window_pages = num_window_pages if split_windows else None
        kv_cache = KVCache(
            num_layers=model_config.num_layers,
            num_kv_heads=kv_heads,
            head_dim=model_config.head_dim,
            num_pages=num_pages,
            page_size=config.page_size,
            dtype=dtype,
            device=device,
            kv_dtype=kv_dtype,
            windowed=windowed,
            num_window_pages=window_pages,
        )
        sizes = config.max_running_requests, max_seq_len, config.page_size
        state = DeviceState(*sizes, num_pages, device, window_dummy=window_pages)
        return ModelRunner(model, kv_cache, make_attention(kv_cache), state, sampler)

    bytes_of_layer = page_bytes(
        num_layers=1,
        num_kv_heads=kv_heads,
        head_dim=model_config.head_dim,
        page_size=config.page_size,
        itemsize=kv_dtype.itemsize,
    )
    bytes_per_page = bytes_of_layer * model_config.num_layers
    bytes_read = 0
    if layers_read:
        # The drafter keeps a hidden state of its own for each token, too, and keys and values like those of a layer.
        bytes_read = (len(layers_read) + 1) * config.page_size * model_config.hidden_size * dtype.itemsize
        bytes_read += page_bytes(1, model_config.num_kv_heads, model_config.head_dim, config.page_size, dtype.itemsize)
    single_row_fusions = () if layers_read else fusions  # decoders for single tokens have no layers to keep states of
    # Not with several ranks yet: they would sum numbers that no kernel has written, which has not been tried.
    if device.type == "cuda" and has_triton() and "compile" not in fusions and communicator.size == 1:
        compile_ahead(config, make_runner(num_pages=1, num_window_pages=1), single_row_fusions)
    num_pages, graph_bytes = config.num_pages, 0
    if num_pages is None:
        trial = make_runner(num_pages=1, num_window_pages=1)

        def fit(config: EngineConfig) -> tuple[int, int]:
            """Pages that fit beside the graphs, and the bytes of the graphs."""
            graph_bytes = measure_graph_memory(trial, sizes_to_capture(config, trial))
            graph_bytes += measure_prefill_memory(config, trial)
            graph_bytes += measure_verify_memory(config, trial)
            pages = pages_that_fit(
                config,
                trial,
                model_bytes=parameter_bytes(model),
                graph_bytes=graph_bytes + (STAGING_PAGES * bytes_per_page if config.page_store == "host" else 0),
                free_before=free_before,
                page_bytes=bytes_per_page + bytes_read,
                num_ranks=communicator.size,
            )
            return pages, graph_bytes

        try:
            num_pages, graph_bytes = fit(config)
        except NotEnoughMemory:
            if communicator.size > 1 or not sizes_to_capture(config, trial):  # ranks measure the same graphs together
                raise
            logger.warning(
                "too little memory for KV pages beside all CUDA graphs, so only steps of one row get one, and others "
                "run eagerly; lower max_graph_batch and max_graph_tokens, or choose a smaller model"
            )
            config = replace(config, graph_batches=None, max_graph_batch=1, max_graph_tokens=0)
            num_pages, graph_bytes = fit(config)
        del trial, fit
    num_pages = min(all_gather_int(num_pages, communicator, device))
    pages, bytes_of_pages = PageSplit(num_pages, num_pages), bytes_per_page + bytes_read
    if split_windows:
        window_bytes = bytes_of_layer * windowed.count(True)
        layers = MixedLayers(
            window=model_config.mixed_window or 0,
            page_size=config.page_size,
            max_seq_len=max_seq_len,
            max_prefill_tokens=config.max_prefill_tokens,
            page_bytes=bytes_per_page - window_bytes,
            window_page_bytes=window_bytes,
            num_draft_tokens=0 if config.drafter == "none" else config.num_draft_tokens,
        )
        pages = split_pages(config, layers, num_pages, device)
        bytes_of_pages = layers.page_bytes + -(-pages.num_window_pages * window_bytes // pages.num_pages)
        logger.info(
            "%d KV pages for %d layers, and %d window pages for the %d layers with a sliding window: %.2f and %.2f GB",
            pages.num_pages,
            windowed.count(False),
            pages.num_window_pages,
            windowed.count(True),
            pages.num_pages * layers.page_bytes / 1e9,
            pages.num_window_pages * window_bytes / 1e9,
        )
    check_num_pages(pages.num_pages, config.page_size, bytes_of_pages, device)

    eager = make_runner(pages.num_pages, pages.num_window_pages)
    states = HiddenStates(model, layers_read, eager.kv_cache) if layers_read else None
    runner = capture_runner(config, eager, single_row_fusions)
    choice = attention_choice(config, eager.kv_cache, model_config.attention_features)
    copier = None
    if config.page_store == "host":
        copier = HostPages(eager.kv_cache, slots_that_fit(config.page_store_gib, bytes_per_page, communicator.size))
    return Engine(config, model_config, runner, choice, bytes_per_page, graph_bytes, communicator, copier, states)


def capture_runner(config: EngineConfig, eager: ModelRunner, fusions: Collection[str] = ()) -> ModelRunner:
    """Return ``eager``, or on CUDA one that replays its steps from graphs, after a warm-up of all of its kernels."""
    device = eager.device
    capture: GraphCapture = CudaGraphCapture(device) if device.type == "cuda" else CpuGraph
    runner = build_prefill_runner(config, eager, capture)  # first: these graphs need the most memory
    runner = build_verify_runner(config, runner, capture)
    runner = build_runner(config, runner, fusions, capture)
    if device.type == "cuda":
        warm_up_kernels(eager, config.max_prefill_tokens)
    return runner


@torch.inference_mode()
def compile_ahead(config: EngineConfig, runner: ModelRunner, fusions: Collection[str] = ()) -> None:
    """Compile the Triton kernels of decode and prefill steps, many at once: otherwise each is when a step needs it.

    Runs some of the steps that are captured and warmed up later, with kernels that do nothing. The few that only
    another step needs are still compiled by it.
    """
    from minisgl.kernels.launch import compile_only

    with compile_only():
        decode = CudaGraphRunner(runner, (), run_once, fused=True, single_row=single_row_decoder(runner, fusions))
        sizes = sizes_to_capture(config, runner)
        for size in sizes:
            if size.bit_count() == 1 or size == sizes[-1]:  # between two powers of two, kernels differ little
                decode.capture(size)
        prefill = PrefillGraphRunner(runner, (), run_once, mixes(config))
        for size in tokens_to_capture(config, runner)[-1:]:
            prefill.capture(size)
        compile_prefill_kernels(runner, config.max_prefill_tokens)
    torch.cuda.empty_cache()


def warn_if_occupied(held: int, total: int) -> None:
    """Warn if this process holds more than a tenth of the device's ``total`` bytes before an engine is sized.

    A second ``llm = LLM(...)`` is built while the first lives: on an H200 it gets 5,600 KV pages instead of 70,900.
    """
    if held > total // 10:
        logger.warning(
            "%.1f of %.1f GB on this device are held by this process already, perhaps by another engine; this one gets "
            "the rest. Call close() on an LLM before you build the next one.",
            held / 1e9,
            total / 1e9,
        )


def rank_device(config: EngineConfig, rank: int) -> torch.device:
    """The device of a rank: with several GPU ranks, rank r has GPU r.

    Raises `ConfigError` for fewer GPUs than ranks, or if one GPU was named for several ranks.
    """
    device = resolve_device(config.device)
    if config.tensor_parallel_size == 1 or device.type == "cpu":
        return device
    if device.index is not None:
        raise ConfigError(
            f"device: {config.device!r} is one GPU and tensor_parallel_size is {config.tensor_parallel_size}; use "
            "'cuda', and choose GPUs with CUDA_VISIBLE_DEVICES"
        )
    if torch.cuda.device_count() < config.tensor_parallel_size:
        raise ConfigError(
            f"tensor_parallel_size: {config.tensor_parallel_size} ranks need as many GPUs, and "
            f"{torch.cuda.device_count()} are present"
        )
    return torch.device("cuda", rank)


def resolve_device(name: str) -> torch.device:
    """The device called ``name``; ``"auto"`` is CUDA if present, else the CPU. `ConfigError` if it is not here."""
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
    """The dtype called ``name``; ``"auto"`` is the checkpoint's on CUDA, and float32 on the CPU."""
    if name == "auto":  # a CPU computes half-width floats slowly or not at all
        return checkpoint if device.type == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def resolve_kv_dtype(name: str, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache; ``"auto"`` is the model's. Raises `ConfigError` if this GPU has no 8-bit floats."""
    if name == "auto":
        return dtype
    check_device("kv_dtype", [torch.float8_e4m3fn], device, "'auto'")
    return torch.float8_e4m3fn


def select_sampler(name: str, device: torch.device, fusions: Collection[str] = ()) -> str:
    """Registered name of the sampler called ``name``; ``"auto"`` is compiled as layers are, or the fastest here."""
    if name != "auto":
        return name
    if "compile" in fusions:
        return "compile"
    return "triton" if device.type == "cuda" and has_triton() else "default"
