"""What is stored, and in which dtype."""

from __future__ import annotations

import pytest
import torch

from minisgl.kvcache.kv_cache import KVCache

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EIGHT_BITS = torch.float8_e4m3fn


def cache_of(dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> KVCache:
    """Two layers, three pages of four tokens, one head of eight; everything is NaN but the dummy page."""
    cache = KVCache(2, 1, 8, 3, 4, dtype, DEVICE, kv_dtype)
    for memory in (cache.k, cache.v):
        memory[:, :3] = torch.tensor(torch.nan).to(memory.dtype)
    return cache


def stored(cache: KVCache, values: torch.Tensor) -> torch.Tensor:
    """``values``, [8], written as the only key of a step, and read again; the value is its opposite."""
    k = values.to(DEVICE, cache.dtype).view(1, 1, 8)
    cache.store(1, k, -k, torch.tensor([6], dtype=torch.int32, device=DEVICE))
    assert torch.equal(cache.k[1, 1, 2].float(), -cache.v[1, 1, 2].float())
    return cache.k[1, 1, 2, 0].double().cpu()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_keys_and_values_are_kept_in_the_models_dtype(dtype: torch.dtype) -> None:
    cache = cache_of(dtype)
    assert cache.dtype == cache.k.dtype == cache.v.dtype == dtype
    values = torch.randn(8, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert torch.equal(stored(cache, values), values.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_eight_bits_keep_three_of_mantissa(dtype: torch.dtype) -> None:
    cache = cache_of(dtype, EIGHT_BITS)
    assert (cache.dtype, cache.k.dtype, cache.v.dtype) == (dtype, EIGHT_BITS, EIGHT_BITS)
    values = torch.tensor([1.0, 1.05, 1.07, -101.0, 2**-6, 2**-9, 0.3 * 2**-9, 0.0])
    assert stored(cache, values).tolist() == [1.0, 1.0, 1.125, -104.0, 2**-6, 2**-9, 0.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_what_eight_bits_cannot_hold_is_cut_off(dtype: torch.dtype) -> None:
    values = torch.tensor([448.0, 449.0, 470.0, 1000.0, -1000.0, 60000.0, torch.inf, -torch.inf])
    assert stored(cache_of(dtype, EIGHT_BITS), values).abs().tolist() == [448.0] * 8


@pytest.mark.parametrize("kv_dtype", [None, EIGHT_BITS])
def test_nothing_else_is_written_and_the_dummy_page_is_finite(kv_dtype: torch.dtype | None) -> None:
    cache = cache_of(torch.float32, kv_dtype)
    stored(cache, torch.ones(8))
    for memory in (cache.k.float(), cache.v.float()):
        assert (memory[:, 3] == 0).all()
        assert memory[:, :3].isfinite().sum() == 8
