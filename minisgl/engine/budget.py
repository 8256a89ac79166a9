"""How many KV pages an engine gets, by either formula of chapter 4."""

from __future__ import annotations

import numpy as np
import torch

from minisgl.core.batch import build_batch
from minisgl.core.config import EngineConfig
from minisgl.core.context import ForwardContext, forward_context
from minisgl.engine.inputs import batch_arrays, device_batch
from minisgl.engine.peak import measure_peak
from minisgl.engine.staging import to_device
from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import free_memory, pages_from_free_memory, pages_from_peak, total_memory
from minisgl.layers import DenseAttention

_INT32_LIMIT = 2**31 - 1
"""A position in the KV memory, page id × page size + offset, must be an int32; only toy models come near."""
_DEFAULT_RATIO = {"cuda": 0.9, "cpu": 0.25}


def pages_that_fit(
    config: EngineConfig,
    model: torch.nn.Module,
    model_bytes: int,
    runner_bytes: int,
    free_before: int,
    max_seq_len: int,
    page_bytes: int,
    device: torch.device,
    num_ranks: int = 1,
) -> int:
    """Number of pages for ``config.memory_ratio`` and ``config.memory_formula``.

    Args:
        config: options.
        model: loaded, for the warm-up of formula B.
        model_bytes: size of its parameters.
        runner_bytes: what the runner will allocate after this, see `RunnerFactory.memory`.
        free_before: bytes that were free before it was loaded, for formula A.
        max_seq_len: longest sequence in tokens.
        page_bytes: bytes of a page over all layers.
        device: of the KV cache.
        num_ranks: that build an engine like this one. On a CPU they share its memory; else each has a device.
    """
    sharing = num_ranks if device.type == "cpu" else 1
    ratio = config.memory_ratio or _DEFAULT_RATIO[device.type]
    if config.memory_formula == "peak":
        with measure_peak(device) as memory:
            warm_up(config, model, max_seq_len, device)
        total = total_memory(device) // sharing
        used = total - free_memory(device) // sharing + runner_bytes
        pages = pages_from_peak(total, used, memory.peak, memory.current, ratio, page_bytes)
    else:
        pages = pages_from_free_memory(free_before // sharing, model_bytes + runner_bytes, ratio, page_bytes)
    pages = min(pages, _INT32_LIMIT // config.page_size - 1)
    if device.type == "cuda":
        return pages
    # What exceeds all slots at full length serves the prefix cache only; leave main memory to others then.
    return min(pages, config.max_running_requests * -(-max_seq_len // config.page_size))


def check_num_pages(num_pages: int, page_size: int, page_bytes: int, device: torch.device) -> None:
    """Refuse a pool that the device cannot hold, or whose positions an int32 cannot index.

    Raises:
        ConfigError: naming the limit.
    """
    limit = min(total_memory(device) // page_bytes, _INT32_LIMIT // page_size - 1)
    if num_pages > limit:
        raise ConfigError(
            f"num_pages: {num_pages} pages of {page_bytes} bytes do not fit; this device can hold at most {limit}"
        )


def largest_prefill(max_tokens: int, max_rows: int, max_seq_len: int) -> list[int]:
    """Tokens that each row feeds in a step that feeds as many as any may: whole sequences, and a chunk of one more."""
    total = min(max_tokens, max_rows * max_seq_len)
    return [min(max_seq_len, total - begin) for begin in range(0, total, max_seq_len)]


@torch.inference_mode()
def warm_up(config: EngineConfig, model: torch.nn.Module, max_seq_len: int, device: torch.device) -> None:
    """Run the largest legal prefill. There is no KV memory yet: each row attends to the step's own tokens."""
    q_lens = largest_prefill(config.max_prefill_tokens, config.max_running_requests, max_seq_len)
    rows = len(q_lens)
    batch = build_batch(
        slots=np.arange(rows, dtype=np.int32),
        q_lens=np.array(q_lens, dtype=np.int32),
        kv_lens=np.zeros(rows, dtype=np.int32),
        page_table=np.zeros((rows, max(q_lens)), dtype=np.int32),
        page_size=1,
        sample_rows=np.arange(rows, dtype=np.int32),
        output_index=np.zeros(rows, dtype=np.int32),
        num_decode=0,
    )
    staged = to_device(batch_arrays(batch), device)
    no_pages = torch.zeros((rows, 1), dtype=torch.int32, device=device)
    inputs = device_batch(staged, torch.zeros_like(staged["positions"]), no_pages)
    attention = DenseAttention()
    attention.plan(batch, inputs)
    with forward_context(ForwardContext(inputs, attention)):
        model(inputs)
