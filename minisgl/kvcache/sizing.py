"""How many KV pages fit into memory: two formulas, and what a device has. All sizes are in bytes, of one rank."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, sqrt
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil
import torch

from minisgl.errors import NotEnoughMemory
from minisgl.request import Int32Array

_CGROUP = Path("/sys/fs/cgroup")


def page_bytes(num_layers: int, num_kv_heads: int, head_dim: int, page_size: int, itemsize: int) -> int:
    """Bytes of one page, keys and values of all layers; ``itemsize`` is that of one element, 2 for bfloat16."""
    return 2 * head_dim * num_kv_heads * page_size * itemsize * num_layers


def pages_from_free_memory(free_before: int, model_bytes: int, memory_ratio: float, page_bytes: int) -> int:
    """Formula A (mini-sglang): a share of the memory that was free before loading, less the model.

    Activations and the dummy page must fit into the rest. Raises `NotEnoughMemory` if not a single page fits.
    """
    budget = int(free_before * memory_ratio) - model_bytes
    return _whole_pages(
        budget, page_bytes, f"{memory_ratio:g} of {free_before} bytes free before loading, less {model_bytes} of model"
    )


def pages_from_peak(total: int, used: int, peak: int, current: int, memory_ratio: float, page_bytes: int) -> int:
    """Formula B (vLLM, nano-vllm): a share of the whole memory, less the use at the worst moment of a step.

    A warm-up with the largest legal prefill measures that moment: this process had ``peak`` bytes allocated then, and
    has ``current`` now, so a step adds the difference to the ``used`` bytes of all processes. Raises
    `NotEnoughMemory` if not a single page fits.
    """
    budget = int(total * memory_ratio) - used - peak + current
    return _whole_pages(
        budget,
        page_bytes,
        f"{memory_ratio:g} of {total} bytes in all, less {used} in use and {peak - current} more at a step's peak",
    )


Lengths = TypeVar("Lengths", int, Int32Array)


def most_pages(
    length: Lengths, max_len: Lengths, page_size: int, window: int | None, num_draft_tokens: int = 0
) -> Lengths:
    """Most pages that a request with ``length`` tokens holds at a time until it has ``max_len``.

    ``window`` is how many positions the model sees; None: all. See `KVMemory.give_back`. A step computes up to
    ``num_draft_tokens`` ahead of a row's newest token.
    """
    pages = -(-(max_len - 1) // page_size)  # the last token is sampled but never fed, so its KV needs no room
    if window is None:
        return pages
    # What the row has of the prefix cache stays until the window has passed all of it; the prompt may be there.
    # Ahead of its oldest query that is not complete, a row has drafts, or a token of the step behind the one in flight.
    passing = np.maximum(length, window) + window + max(num_draft_tokens, 1)
    fewer: Lengths = np.minimum(pages, -(-passing // page_size) + 1)
    return fewer


def most_window_pages(max_len: Lengths, page_size: int, window: int, num_draft_tokens: int = 0) -> Lengths:
    """Most window pages that a request needs at a time, prefill chunks apart, until it has ``max_len`` tokens.

    For models that have layers with a ``window`` and layers without: see `WindowPages`. A step computes up to
    ``num_draft_tokens`` ahead of a row's newest token.
    """
    passing = window + max(num_draft_tokens, 1)
    fewer: Lengths = np.minimum(-(-(max_len - 1) // page_size), -(-passing // page_size) + 1)
    return fewer


@dataclass(frozen=True, slots=True)
class PageSplit:
    """How many pages layers without a window have, and how many those with one."""

    num_pages: int
    num_window_pages: int


@dataclass(frozen=True, slots=True)
class MixedLayers:
    """What decides how many window pages a model with layers of both kinds gets. Sizes in tokens and in bytes."""

    window: int  # the longest one
    page_size: int
    max_seq_len: int
    max_prefill_tokens: int
    page_bytes: int  # a page of all layers without a window
    window_page_bytes: int  # a page of all layers with one
    num_draft_tokens: int = 0  # most that a step verifies of a row

    @property
    def share(self) -> float:
        """Window pages for a page.

        A request of L tokens wants window / L, and all that we know of L is that it matters between the window and
        ``max_seq_len``. So we take the geometric mean of the two, which is wrong by the same factor at both ends.
        """
        return min(1.0, sqrt(self.window / self.max_seq_len))

    @property
    def least(self) -> int:
        """Window pages that one request needs: those of its window, and of the longest prefill chunk."""
        chunk = -(-min(self.max_prefill_tokens, self.max_seq_len) // self.page_size)
        return int(most_window_pages(self.max_seq_len, self.page_size, self.window, self.num_draft_tokens)) + chunk

    def split(self, budget: int, most_pages: int) -> PageSplit:
        """Divide ``budget`` bytes; at most ``most_pages`` pages are of use, and as many window pages."""
        pages = int(budget / (self.page_bytes + self.share * self.window_page_bytes))
        if self.window_pages(pages) > pages * self.share + 1:  # the least is more than the share
            pages = (budget - self.least * self.window_page_bytes) // self.page_bytes
        even = budget // (self.page_bytes + self.window_page_bytes)
        pages = min(max(pages, even), most_pages)
        left = (budget - pages * self.page_bytes) // self.window_page_bytes
        return PageSplit(pages, min(left, self.window_pages(pages)))

    def window_pages(self, num_pages: int) -> int:
        """Window pages to go with so many pages."""
        return min(num_pages, max(self.least, ceil(num_pages * self.share)))


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
        raise NotEnoughMemory(
            f"memory: not one page fits. A page takes {page_bytes} bytes, {max(0, budget)} are left for KV ({origin}). "
            "Raise memory_ratio, lower page_size or max_prefill_tokens, choose a smaller model or dtype, "
            "free memory on the device, or set num_pages yourself."
        )
    return budget // page_bytes


def _container_memory() -> tuple[int, int] | None:
    """Limit and use in bytes of our container, which sees its host's whole memory (cgroup v2); None without a limit."""
    try:
        limit = int((_CGROUP / "memory.max").read_text())  # the text "max" where there is no limit
        used = int((_CGROUP / "memory.current").read_text())
        stat = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        return limit, used - int(stat["inactive_file"])  # cached files give way when memory is wanted
    except (OSError, ValueError, KeyError):
        return None
