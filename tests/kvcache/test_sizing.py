from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from minisgl.errors import NotEnoughMemory
from minisgl.kvcache import sizing
from minisgl.kvcache.pool import KVCache
from minisgl.kvcache.sizing import (
    MixedLayers,
    free_memory,
    most_window_pages,
    page_bytes,
    pages_from_free_memory,
    pages_from_peak,
    total_memory,
)

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


@pytest.fixture(autouse=True)
def no_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sizing, "_CGROUP", tmp_path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_page_bytes_is_what_a_page_of_the_cache_takes(dtype: torch.dtype) -> None:
    cache = KVCache(
        3, num_kv_heads=2, head_dim=8, num_pages=5, page_size=16, dtype=torch.float32, device=CPU, kv_dtype=dtype
    )
    a_page = page_bytes(num_layers=3, num_kv_heads=2, head_dim=8, page_size=16, itemsize=dtype.itemsize)
    assert cache.k.nbytes + cache.v.nbytes == (5 + 1) * a_page  # and the dummy page


def test_page_bytes_of_a_known_model() -> None:
    """Qwen3-0.6B in bfloat16: 28 layers, 8 KV heads of 128; 112 KiB a token."""
    assert page_bytes(28, 8, 128, 1, 2) == 112 * 1024


def test_pages_from_free_memory() -> None:
    # 90 % of 1000 bytes less 300 of model are 600: six pages of 99 and six bytes.
    assert pages_from_free_memory(free_before=1000, model_bytes=300, memory_ratio=0.9, page_bytes=99) == 6
    assert pages_from_free_memory(free_before=1000, model_bytes=300, memory_ratio=0.9, page_bytes=600) == 1


def test_pages_from_peak() -> None:
    # 90 % of 2000 less 500 in use is 1300; a step needs 300 more than is allocated now, which leaves 1000.
    for size, count in ((99, 10), (1000, 1)):
        pages = pages_from_peak(total=2000, used=500, peak=400, current=100, memory_ratio=0.9, page_bytes=size)
        assert pages == count


def test_formulas_agree_where_nothing_but_the_model_takes_memory() -> None:
    model = 3 * GIB
    a = pages_from_free_memory(16 * GIB, model, 0.5, 1 << 20)
    b = pages_from_peak(total=16 * GIB, used=model, peak=model, current=model, memory_ratio=0.5, page_bytes=1 << 20)
    assert a == b == 5 * 1024


def test_not_a_page_fits_beside_the_model() -> None:
    with pytest.raises(NotEnoughMemory) as error:
        pages_from_free_memory(free_before=1000, model_bytes=300, memory_ratio=0.9, page_bytes=601)
    for part in ("601 bytes", "600 are left", "0.9 of 1000", "300 of model", "memory_ratio", "page_size", "num_pages"):
        assert part in str(error.value)


def test_not_a_page_fits_beside_the_peak() -> None:
    with pytest.raises(NotEnoughMemory) as error:
        pages_from_peak(total=1000, used=900, peak=400, current=100, memory_ratio=0.9, page_bytes=16)
    for part in ("16 bytes", "0 are left", "0.9 of 1000", "900 in use", "300 more", "max_prefill_tokens", "num_pages"):
        assert part in str(error.value)


def test_main_memory() -> None:
    assert total_memory(CPU) == psutil.virtual_memory().total
    assert 0 < free_memory(CPU) < total_memory(CPU)


def test_device_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3, 8) if device == CUDA else None)
    assert (free_memory(CUDA), total_memory(CUDA)) == (3, 8)


def container(folder: Path, limit: str, used: int, inactive_file: int) -> None:
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 1\ninactive_file {inactive_file}\n")


@pytest.fixture
def host_of_16_gib(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = SimpleNamespace(total=16 * GIB, available=12 * GIB)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory)


@pytest.mark.usefixtures("host_of_16_gib")
@pytest.mark.parametrize(
    ("limit", "used", "inactive_file", "free", "total"),
    [
        (4 * GIB, 3 * GIB, 0, 1 * GIB, 4 * GIB),
        (4 * GIB, 3 * GIB, 2 * GIB, 3 * GIB, 4 * GIB),
        (4 * GIB, 5 * GIB, 0, 0, 4 * GIB),
        (32 * GIB, 1 * GIB, 0, 12 * GIB, 16 * GIB),
        ("max", 1 * GIB, 0, 12 * GIB, 16 * GIB),
    ],
)
def test_a_container_has_its_own_share(
    tmp_path: Path, limit: object, used: int, inactive_file: int, free: int, total: int
) -> None:
    container(tmp_path, str(limit), used, inactive_file)
    assert (free_memory(CPU), total_memory(CPU)) == (free, total)


# -- window pages ------------------------------------------------------------------------------------------------------

# A layer has keys and values of 16 heads of 128, and of 8 heads of 64, in pages of 16 tokens of two bytes.
GEMMA_27B = MixedLayers(1024, 16, 131_072, 8192, 10 * 131_072, 52 * 131_072)
GPT_OSS_20B = MixedLayers(128, 16, 131_072, 8192, 12 * 32_768, 12 * 32_768)


@pytest.mark.parametrize("layers", [GEMMA_27B, GPT_OSS_20B], ids=["Gemma 3 27B", "gpt-oss-20b"])
@pytest.mark.parametrize("budget", [GIB // 8, GIB, 16 * GIB, 60 * GIB])
def test_the_pools_take_the_budget_and_one_request_finds_room(layers: MixedLayers, budget: int) -> None:
    split = layers.split(budget, most_pages=1 << 27)
    taken = split.num_pages * layers.page_bytes + split.num_window_pages * layers.window_page_bytes
    assert budget - layers.page_bytes - 2 * layers.window_page_bytes < taken <= budget
    even = budget // (layers.page_bytes + layers.window_page_bytes)
    assert split.num_pages >= even
    # As many as the window and a chunk need, or one for each page.
    assert split.num_window_pages >= min(layers.least, split.num_pages)


@pytest.mark.parametrize(("layers", "gain"), [(GEMMA_27B, 4.0), (GPT_OSS_20B, 1.9)], ids=["Gemma 3 27B", "gpt-oss-20b"])
def test_more_long_requests_fit_into_the_same_memory(layers: MixedLayers, gain: float) -> None:
    split = layers.split(16 * GIB, most_pages=1 << 27)
    even = 16 * GIB // (layers.page_bytes + layers.window_page_bytes)
    assert split.num_pages > gain * even
    rows = 16 * split.num_pages / 16_384
    assert rows * most_window_pages(16_384, 16, layers.window) < split.num_window_pages, "they run short of pages first"


def test_a_window_as_long_as_the_context_has_a_window_page_for_each_page() -> None:
    layers = MixedLayers(4096, 16, 4096, 2048, 100, 100)
    split = layers.split(100_000, most_pages=1 << 27)
    assert (split.num_pages, split.num_window_pages) == (500, 500)
    assert layers.window_pages(320) == 320


def test_no_more_pages_than_are_of_use() -> None:
    split = GEMMA_27B.split(16 * GIB, most_pages=100)
    assert (split.num_pages, split.num_window_pages) == (100, 100)


def test_most_window_pages() -> None:
    # The window, and one position or the drafts that a step may be ahead, may begin within a page.
    assert most_window_pages(10_000, 16, 128) == 9 + 1
    assert most_window_pages(10_000, 16, 127) == 8 + 1
    assert most_window_pages(10_000, 16, 128, 16) == 9 + 1
    assert most_window_pages(10_000, 16, 128, 17) == 10 + 1
    assert most_window_pages(33, 16, 128, 17) == 2
