"""SiLU·mul, and residual addition with RMSNorm, as one kernel each: against float64 and against the layers."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.norm import add_and_norm, silu_and_mul
from minisgl.layers.mlp import silu_and_mul as plain_silu_and_mul
from minisgl.layers.norm import RMSNorm
from tests.kernels.closeness import DEVICE, assert_close, every_dtype, random, spread


@every_dtype
@pytest.mark.parametrize("size", [1, 48, 128, 1024, 3000])
def test_equals_float64(dtype: torch.dtype, size: int) -> None:
    gate_up = random(3, 2 * size, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(gate_up), gate * gate.sigmoid() * up, dtype)


@every_dtype
def test_equals_the_plain_function(dtype: torch.dtype) -> None:
    gate_up = random(2, 200, dtype=dtype)
    out = silu_and_mul(gate_up)
    assert out.shape == (2, 100)
    # The plain one rounds twice, after the SiLU and after the product.
    plain = plain_silu_and_mul(gate_up).double()
    assert float((out.double() - plain).norm() / plain.norm()) < 2 * torch.finfo(dtype).eps


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]]).to(random(1, dtype=torch.float32).device)
    assert silu_and_mul(gate_up).tolist() == [[pytest.approx(0, abs=1e-30), pytest.approx(0, abs=1e-30), 90.0, 200.0]]


def test_rows_may_lie_apart() -> None:
    gate_up = random(5, 80, dtype=torch.float32)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(spread(gate_up)), gate * gate.sigmoid() * up, torch.float32)


EPS = 1e-5


def reference(total: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    total = total.double()
    return total / (total.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


@every_dtype
@pytest.mark.parametrize("size", [1, 32, 100, 128, 1024, 5120])
def test_norm_equals_float64(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (random(rows, size, dtype=dtype, seed=rows) for rows in (3, 3, 1))
    residual = residual.flip(0)
    before = x.clone(), residual.clone()
    normed, total = add_and_norm(x, residual, weight[0], EPS)
    assert_close(total, x.double() + residual.double(), dtype)
    assert_close(normed, reference(total, weight[0]), dtype)
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@every_dtype
def test_equals_the_layer(dtype: torch.dtype) -> None:
    norm = RMSNorm(96, EPS).to(DEVICE, dtype)
    norm.weight.copy_(random(96, dtype=dtype))
    x, residual = random(4, 96, dtype=dtype, seed=1), random(4, 96, dtype=dtype, seed=2)
    for stream in (residual, None):
        outputs = add_and_norm(x, stream, norm.weight, norm.eps)
        for ours, plain in zip(outputs, norm.add_and_norm(x, stream), strict=True):
            assert_close(ours, plain.double(), dtype)


def test_without_a_residual_the_sum_is_the_input() -> None:
    x, weight = random(2, 48, dtype=torch.float32), random(48, dtype=torch.float32)
    normed, total = add_and_norm(x, None, weight, EPS)
    assert total is x
    assert_close(normed, reference(x, weight), torch.float32)


def test_the_sum_is_rounded_before_it_is_normalised() -> None:
    """From the rounded sum, each element is off by the rounding of the result alone, and not by that of the sum too."""
    dtype = torch.float16
    x, residual, weight = (
        random(64, 64, dtype=dtype, seed=1),
        random(64, 64, dtype=dtype, seed=2),
        random(64, dtype=dtype),
    )
    normed, total = add_and_norm(x, residual, weight, EPS)
    exact = reference(total, weight)
    off = (normed.double() - exact).abs() / exact.abs()
    assert off[exact.abs() > 1e-3].max() < 1.02 * torch.finfo(dtype).eps / 2


def test_half_precision_squares_do_not_overflow() -> None:
    x = torch.full((1, 8), 3e4, dtype=torch.float16, device=DEVICE)  # 9e8 is beyond float16
    normed, _ = add_and_norm(x, None, torch.ones(8, dtype=torch.float16, device=DEVICE), EPS)
    assert torch.equal(normed, torch.ones_like(normed))


def test_rows_to_normalise_may_lie_apart() -> None:
    x, residual = random(5, 40, dtype=torch.float32, seed=1), random(5, 40, dtype=torch.float32, seed=2)
    weight = random(40, dtype=torch.float32)
    for near_or_far in ((spread(x), residual), (x, spread(residual))):
        normed, total = add_and_norm(*near_or_far, weight, EPS)
        assert_close(total, x.double() + residual.double(), torch.float32)
        assert_close(normed, reference(total, weight), torch.float32)
