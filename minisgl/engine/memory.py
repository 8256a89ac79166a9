"""How many KV pages an engine gets, what its ranks agree on, and the warm-up of its kernels."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import psutil
import torch

from minisgl.attention.select import ATTENTION_BACKENDS
from minisgl.batch import Batch, NewRequest, build_batch
from minisgl.config import EngineConfig
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampling import SamplingTable
from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import (
    MixedLayers,
    PageSplit,
    free_memory,
    pages_from_free_memory,
    pages_from_peak,
    total_memory,
)
from minisgl.layers.sharding import Communicator
from minisgl.models.config import ModelConfig
from minisgl.sampling_params import SamplingParams

# Most entries of the token table, and most positions in the KV cache (page id × page size + offset): an int32 indexes
# both. Only toy models come near.
INT32_MAX = 2**31 - 1
_DEFAULT_MEMORY_RATIO = {"cuda": 0.9, "cpu": 0.25}
_RSS_INTERVAL_S = 0.005
_LARGEST_IMBALANCE = 2 << 30


# -- pages -------------------------------------------------------------------------------------------------------------


def pages_that_fit(
    config: EngineConfig,
    trial: ModelRunner,
    *,
    model_bytes: int,
    graph_bytes: int,
    free_before: int,
    page_bytes: int,
    num_ranks: int = 1,
) -> int:
    """Number of pages for ``config.memory_ratio`` and ``config.memory_formula`` (`minisgl.kvcache.sizing`).

    ``trial`` computes steps over a KV cache of one page; ``graph_bytes`` will be allocated by CUDA graphs;
    ``free_before`` were free before the model was loaded (formula A). On a CPU, ``num_ranks`` engines share the memory.
    """
    device = trial.device
    sharing = num_ranks if device.type == "cpu" else 1
    ratio = config.memory_ratio or _DEFAULT_MEMORY_RATIO[device.type]
    if config.memory_formula == "peak":
        memory = measure_worst_steps(trial, config.max_prefill_tokens)
        total = total_memory(device) // sharing
        used = total - free_memory(device) // sharing + graph_bytes
        pages = pages_from_peak(total, used, memory.peak, memory.current, ratio, page_bytes)
    else:
        free = free_before // sharing
        taken = model_bytes + graph_bytes
        if device.type == "cuda":  # the share that is left out must hold a step; on a small card it may not
            memory = measure_worst_steps(trial, config.max_prefill_tokens)
            taken += max(0, memory.peak - memory.current - (free - int(free * ratio)))
        pages = pages_from_free_memory(free, taken, ratio, page_bytes)
    pages = min(pages, INT32_MAX // config.page_size - 1)
    if device.type == "cuda":
        return pages
    # What exceeds all slots at full length serves the prefix cache only; leave main memory to others then.
    max_seq_len = trial.state.tokens.shape[1]
    return min(pages, config.max_running_requests * -(-max_seq_len // config.page_size))


def can_split_windows(config: EngineConfig, model: ModelConfig) -> bool:
    """Whether layers with a sliding window get pages of their own, in a model where others have none.

    Not with a page store, which copies a page as a whole, and not with an attention backend of your own, which may read
    one page table for all layers. (Nor with a drafter that reads hidden states by their pages, as `build_engine` sees.)
    """
    known = {"auto", *ATTENTION_BACKENDS}
    backends = {config.prefill_attention, config.decode_attention}
    return model.mixed_window is not None and config.page_store == "none" and backends <= known


def split_pages(config: EngineConfig, layers: MixedLayers, num_pages: int, device: torch.device) -> PageSplit:
    """Divide the memory of ``num_pages`` that all layers would have; or of ``config.num_pages``, add window pages."""
    if config.num_pages is not None:
        return PageSplit(num_pages, layers.window_pages(num_pages))
    most = INT32_MAX // config.page_size - 1
    if device.type != "cuda":
        most = min(most, config.max_running_requests * -(-layers.max_seq_len // config.page_size))
    return layers.split(num_pages * (layers.page_bytes + layers.window_page_bytes), most)


def check_num_pages(num_pages: int, page_size: int, page_bytes: int, device: torch.device) -> None:
    """Raise `ConfigError` for a pool that the device cannot hold, or whose positions an int32 cannot index."""
    limit = min(total_memory(device) // page_bytes, INT32_MAX // page_size - 1)
    if num_pages > limit:
        raise ConfigError(
            f"num_pages: {num_pages} pages of {page_bytes} bytes do not fit; this device can hold at most {limit}"
        )


def longest_sequence(config: EngineConfig, model_limit: int) -> int:
    """``max_seq_len``, or the most that the model's positions and int32 indices allow; `ConfigError` if it is more."""
    indexable = INT32_MAX // (config.max_running_requests + 1)
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


# -- the peak of a step ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class MemoryPeak:
    """Bytes that this process held on a device: at the worst moment of a block, and after it."""

    peak: int = 0
    current: int = 0


@contextmanager
def measure_peak_memory(device: torch.device) -> Iterator[MemoryPeak]:
    """Fill in the yielded `MemoryPeak` when the block ends.

    On CUDA the allocator knows the peak of what it has reserved, gaps between tensors and all; on the CPU we sample the
    resident size every 5 ms, and may miss a short peak.
    """
    result = MemoryPeak()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        yield result
        torch.cuda.synchronize(device)
        result.peak = torch.cuda.max_memory_reserved(device)
        torch.cuda.empty_cache()
        result.current = torch.cuda.memory_reserved(device)
        return
    process = psutil.Process()
    done = threading.Event()

    def sample() -> None:
        while not done.wait(_RSS_INTERVAL_S):
            result.peak = max(result.peak, process.memory_info().rss)

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        yield result
    finally:
        done.set()
        sampler.join()
    result.current = process.memory_info().rss
    result.peak = max(result.peak, result.current)


def largest_prefill(max_tokens: int, max_rows: int, max_seq_len: int) -> list[int]:
    """Tokens that each row feeds in the largest legal step: whole sequences, and a chunk of one more."""
    total = min(max_tokens, max_rows * max_seq_len)
    return [min(max_seq_len, total - begin) for begin in range(0, total, max_seq_len)]


def measure_worst_steps(runner: ModelRunner, max_prefill_tokens: int) -> MemoryPeak:
    """Run the steps that need the most memory, with the engine's own attention and sampler, and measure their peak.

    They are the prefill with the most tokens, and the one with the most rows, each of which wants the costliest
    sampling. All of them read and write the dummy slot and page.
    """
    tokens, rows, *_ = _prefill_steps(runner, max_prefill_tokens)
    with measure_peak_memory(runner.device) as memory:
        for batch in (tokens, rows):
            run_dummy_step(runner, batch, _SAMPLING_KINDS[-1])
    return memory


# -- ranks -------------------------------------------------------------------------------------------------------------


def all_gather_int(value: int, communicator: Communicator, device: torch.device) -> list[int]:
    """Every rank's ``value``, in the order of the ranks."""
    numbers = torch.tensor([[value]], dtype=torch.int64, device=device)
    values: list[int] = communicator.all_gather(numbers)[0].tolist()
    return values


def check_memory_balance(free: int, communicator: Communicator, device: torch.device) -> None:
    """Raise `ConfigError` on all ranks if two devices' ``free`` bytes differ by more than 2 GiB, and name the two.

    The fullest device would decide for all.
    """
    # One all-reduce of the least and the most would do for the check; the error has to name the ranks as well.
    by_rank = all_gather_int(free, communicator, device)
    least, most = min(by_rank), max(by_rank)
    if most - least > _LARGEST_IMBALANCE:
        raise ConfigError(
            f"memory: rank {by_rank.index(least)} has {least >> 20} MiB free and rank {by_rank.index(most)} has "
            f"{most >> 20} MiB, which is more than {_LARGEST_IMBALANCE >> 20} MiB apart; end what else runs on the "
            "fuller device, or choose other devices with CUDA_VISIBLE_DEVICES"
        )


# -- warm-up -----------------------------------------------------------------------------------------------------------

# Ways to sample that have kernels of their own. The last one needs the most memory: it sorts the vocabulary.
_SAMPLING_KINDS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_k=20, top_p=0.9, min_p=0.01),
    SamplingParams(temperature=1.0, top_p=0.9, repetition_penalty=1.1, logprobs=20),
)


def warm_up_kernels(runner: ModelRunner, max_prefill_tokens: int) -> None:
    """Run prefill steps on the dummy slot and page, from the largest legal one down, and sample in every way."""
    for batch in _prefill_steps(runner, max_prefill_tokens):
        for params in _SAMPLING_KINDS:
            run_dummy_step(runner, batch, params)


def compile_prefill_kernels(runner: ModelRunner, max_prefill_tokens: int) -> None:
    """Launch the kernels of these steps inside `compile_only`, where they do nothing.

    Tokens that were not sampled are what the memory held before, and may not be looked up: so without logprobs, and
    no step finds those of the one before.
    """
    for batch in _prefill_steps(runner, max_prefill_tokens):
        for params in _SAMPLING_KINDS:
            run_dummy_step(runner, batch, replace(params, logprobs=None))
            runner.state.tokens.zero_()


@torch.inference_mode()
def run_dummy_step(runner: ModelRunner, batch: Batch, params: SamplingParams) -> None:
    """Compute ``batch``, which has no request in it, and sample all of its rows with ``params``."""
    table = SamplingTable(1)
    table.admit(NewRequest(0, np.zeros(1, dtype=np.int32), 1, params, (), seed=0))
    first = np.zeros(batch.num_rows, dtype=np.int32)
    runner.run(batch, table.rows(first, first))


def _prefill_steps(runner: ModelRunner, max_prefill_tokens: int) -> Iterator[Batch]:
    num_slots, longest = runner.state.tokens.shape[0], runner.state.tokens.shape[1] - 1
    most = largest_prefill(max_prefill_tokens, num_slots - 1, longest)
    few = min(16, sum(most), longest - longest // 2)
    # As many tokens as a step may have, in long rows, then in as many rows as may be; a few; a few behind cached ones.
    yield _prefill(runner, most, cached=0)
    yield _prefill(runner, [few] * min(num_slots - 1, sum(most) // few), cached=0)
    yield _prefill(runner, [few], cached=0)
    yield _prefill(runner, [few], cached=longest // 2)


def _prefill(runner: ModelRunner, q_lens: list[int], cached: int) -> Batch:
    state, rows = runner.state, len(q_lens)
    num_slots, width = state.page_table.shape
    return build_batch(
        slots=np.full(rows, num_slots - 1, dtype=np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.full(rows, cached, dtype=np.int32),
        page_table=np.full((num_slots, width), state.dummy_page, dtype=np.int32),
        page_size=runner.kv_cache.page_size,
        sample_rows=np.arange(rows, dtype=np.int32),
        output_index=np.zeros(rows, dtype=np.int32),
        num_decode=0,
    )
