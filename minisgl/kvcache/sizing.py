"""Chapter 4: how many pages of KV fit into memory. Two formulas, and where their numbers come from.

All sizes are in bytes, of one device (one rank).
"""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from minisgl.errors import ConfigError

_CGROUP = Path("/sys/fs/cgroup")


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, itemsize: int) -> int:
    """Bytes of one page over all layers, keys and values.

    Args:
        num_layers: attention layers of the model.
        num_kv_heads: key/value heads on this rank.
        head_dim: width of a head.
        page_size: tokens a page.
        itemsize: bytes of one element, 2 for bfloat16.
    """
    return 2 * head_dim * num_kv_heads * page_size * itemsize * num_layers


def pages_from_free_memory(free_before: int, model_bytes: int, memory_ratio: float, page_bytes: int) -> int:
    """Formula A (mini-sglang): a share of the memory that was free before the model was loaded, less the model.

    What the share leaves out must hold the activations, and the dummy page of the pool.

    Args:
        free_before: bytes free on the device before loading.
        model_bytes: bytes that loading has taken.
        memory_ratio: share for model and KV together, in (0, 1].
        page_bytes: bytes of a page.

    Returns:
        Number of pages, at least 1.

    Raises:
        ConfigError: not a single page fits.
    """
    budget = int(free_before * memory_ratio) - model_bytes
    return _whole_pages(
        budget, page_bytes, f"{memory_ratio:g} of {free_before} bytes free before loading, less {model_bytes} of model"
    )


def pages_from_peak(total: int, used: int, peak: int, current: int, memory_ratio: float, page_bytes: int) -> int:
    """Formula B (vLLM, nano-vllm): a share of the whole memory, less what is in use at the worst moment of a step.

    The worst moment is measured: a warm-up run with the largest legal prefill. ``used`` counts what is allocated now;
    a step adds ``peak − current`` to it while it runs.

    Args:
        total: bytes of the device.
        used: bytes of it in use after the warm-up, by this process and all others, ``total − free``.
        peak: most bytes that this process had allocated during the warm-up.
        current: bytes that it has allocated now.
        memory_ratio: share of ``total`` that may be in use, in (0, 1].
        page_bytes: bytes of a page.

    Returns:
        Number of pages, at least 1.

    Raises:
        ConfigError: not a single page fits.
    """
    budget = int(total * memory_ratio) - used - peak + current
    return _whole_pages(
        budget,
        page_bytes,
        f"{memory_ratio:g} of {total} bytes in all, less {used} in use and {peak - current} more at a step's peak",
    )


def free_memory(device: torch.device) -> int:
    """Bytes that can still be allocated on ``device``: CUDA memory, or main memory for any other device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    available = int(psutil.virtual_memory().available)
    container = _container_memory()
    return available if container is None else min(available, max(0, container[0] - container[1]))


def total_memory(device: torch.device) -> int:
    """Bytes of memory that ``device`` has: CUDA memory, or main memory for any other device."""
    if device.type == "cuda":
        _, total = torch.cuda.mem_get_info(device)
        return total
    total = int(psutil.virtual_memory().total)
    container = _container_memory()
    return total if container is None else min(total, container[0])


def _whole_pages(budget: int, page_bytes: int, origin: str) -> int:
    if budget < page_bytes:
        raise ConfigError(
            f"memory: not one page fits. A page takes {page_bytes} bytes, {max(0, budget)} are left for KV ({origin}). "
            "Raise memory_ratio, lower page_size or max_prefill_tokens, choose a smaller model or dtype, "
            "free memory on the device, or set num_pages yourself."
        )
    return budget // page_bytes


def _container_memory() -> tuple[int, int] | None:
    """Limit and use of the container that we run in (Linux cgroup v2), in bytes; None where there is no limit.

    A container sees the memory of its whole host, and is killed when it uses more than its own share.
    """
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # the text "max" where there is no limit
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit, used - int(stat["inactive_file"])  # cached files give way when memory is wanted
    except (OSError, ValueError, KeyError):
        return None
