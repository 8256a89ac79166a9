"""QK-norm + rotary embedding + KV store as one kernel, against the layers in float64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

from minisgl.context import AttentionSpec
from minisgl.kernels.rope import rotate_and_store
from minisgl.kvcache.pool import KVCache
from minisgl.layers.attention import Attention
from minisgl.layers.rotary import RopeSettings, Rotary, rotate
from tests.kernels.closeness import DEVICE, assert_close, every_dtype, random, spread

PAGE_SIZE, PAGES, POSITIONS = 4, 5, 64


class Stored(NamedTuple):
    """What the kernel writes, and what it must not: the memory of all other locations."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    rest: torch.Tensor


class Case:
    """An attention layer with random weights, and some tokens."""

    def __init__(self, heads: tuple[int, int], head_dim: int, dtype: torch.dtype, norm: bool, tokens: int = 5) -> None:
        num_heads, num_kv_heads = heads
        spec = AttentionSpec(0, num_heads, num_kv_heads, head_dim, 1.0)
        self.dtype = dtype
        self.layer = Attention(8, spec, qk_norm_eps=1e-4 if norm else None).to(DEVICE, dtype)
        for module, seed in ((self.layer.q_norm, 11), (self.layer.k_norm, 12)):
            if module is not None:
                module.weight.copy_(random(head_dim, dtype=dtype, seed=seed))
        self.rotary = Rotary(head_dim, POSITIONS, RopeSettings()).to(DEVICE)
        self.qkv = random(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=13)
        generator = torch.Generator().manual_seed(14)
        self.positions = torch.randint(POSITIONS, (tokens,), generator=generator, dtype=torch.int32).to(DEVICE)
        locations = torch.randperm(PAGES * PAGE_SIZE, generator=generator)[:tokens]
        self.out_locs = locations.to(DEVICE, torch.int32)

    def cache(self, dtype: torch.dtype, kv_dtype: torch.dtype | None = None) -> KVCache:
        spec, device = self.layer.spec, torch.device(DEVICE)
        cache = KVCache(2, spec.num_kv_heads, spec.head_dim, PAGES, PAGE_SIZE, dtype, device, kv_dtype)
        cache.k.fill_(torch.nan)
        cache.v.fill_(torch.nan)
        return cache

    def read(self, q: torch.Tensor, cache: KVCache) -> Stored:
        locations = self.out_locs.long()
        k, v = cache.k[1].flatten(0, 1), cache.v[1].flatten(0, 1)
        written = k[locations], v[locations]
        k[locations], v[locations] = 0.0, 0.0
        rest = [k, v, cache.k[0].flatten(0, 1), cache.v[0].flatten(0, 1)]
        return Stored(q, *written, torch.stack([memory.float() for memory in rest]))

    def fused(self, qkv: torch.Tensor | None = None, kv_dtype: torch.dtype | None = None) -> Stored:
        cache = self.cache(self.dtype, kv_dtype)
        q = rotate_and_store(
            self.qkv if qkv is None else qkv,
            self.rotary.table,
            self.positions,
            self.out_locs,
            cache.k[1],
            cache.v[1],
            None if self.layer.q_norm is None else self.layer.q_norm.weight,
            None if self.layer.k_norm is None else self.layer.k_norm.weight,
            1e-4,
        )
        return self.read(q, cache)

    def plain(self) -> Stored:
        """The code of `Attention.forward` and `KVCache.store`, in float64."""
        spec, first_v = self.layer.spec, self.layer.spec.num_heads + self.layer.spec.num_kv_heads
        layer, cache = self.layer.double(), self.cache(torch.float64)
        qkv = self.qkv.double().view(len(self.qkv), -1, spec.head_dim)
        qk = rotate(layer.normalize(qkv[:, :first_v]), self.rotary(self.positions, torch.float64))
        cache.store(1, qk[:, spec.num_heads :], qkv[:, first_v:], self.out_locs)
        return self.read(qk[:, : spec.num_heads], cache)

    def check(self, fused: Stored) -> None:
        plain = self.plain()
        assert_close(fused.q, plain.q, self.dtype)
        assert_close(fused.k, plain.k, self.dtype)
        assert torch.equal(fused.v.double(), plain.v)
        assert torch.equal(fused.rest.isnan(), plain.rest.isnan())


@every_dtype
@pytest.mark.parametrize("norm", [True, False], ids=["qk-norm", "plain"])
@pytest.mark.parametrize("head_dim", [8, 80, 128])
def test_equals_the_layers_in_float64(dtype: torch.dtype, norm: bool, head_dim: int) -> None:
    case = Case((4, 2), head_dim, dtype, norm)
    case.check(case.fused())


@pytest.mark.parametrize("heads", [(1, 1), (4, 1), (9, 3), (14, 2), (40, 8)])
def test_any_number_of_heads(heads: tuple[int, int]) -> None:
    case = Case(heads, 16, torch.float32, norm=True, tokens=3)
    case.check(case.fused())


@pytest.mark.parametrize("head_dim", [2, 24, 64, 96, 256])
def test_any_even_width(head_dim: int) -> None:
    case = Case((2, 2), head_dim, torch.float32, norm=True, tokens=2)
    case.check(case.fused())


def test_projections_may_lie_apart() -> None:
    case = Case((4, 2), 16, torch.float32, norm=True)
    case.check(case.fused(spread(case.qkv)))


@every_dtype
def test_keys_and_values_of_eight_bits(dtype: torch.dtype) -> None:
    """Rounded to three bits of mantissa, or to multiples of 2⁻⁹, or to the largest number there is."""
    case = Case((4, 2), 64, dtype, norm=True)
    first_v = 4 * 64 + 2 * 64
    case.qkv[1, first_v:] *= 300
    case.qkv[2, first_v:] *= torch.inf
    fused, plain = case.fused(kv_dtype=torch.float8_e4m3fn), case.plain()
    assert (plain.v.abs() > 448).sum() > 100
    assert_close(fused.q, plain.q, dtype)
    for ours, exact in ((fused.k, plain.k), (fused.v, plain.v)):
        assert ours.dtype == torch.float8_e4m3fn
        exact = exact.clamp(-448, 448)
        assert ((ours.double() - exact).abs() <= (exact.abs() * 2**-4).clamp(min=2**-10) * 1.001).all()
    assert torch.equal(fused.rest.isnan(), plain.rest.isnan())


def test_rounds_once() -> None:
    """Closer to float64 than the plain layers are in the same dtype, which round after each operation."""
    case = Case((8, 4), 64, torch.float16, norm=True, tokens=8)
    qk = case.qkv.view(8, -1, 64)[:, :12]
    rounded = rotate(case.layer.normalize(qk), case.rotary(case.positions, torch.float16))[:, :8].double()
    fused, exact = case.fused().q.double(), case.plain().q
    assert (fused - exact).norm() < 0.7 * (rounded - exact).norm()
