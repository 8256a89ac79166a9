"""Norm and SiLU × up that round their rows to e4m3: bit by bit the plain kernel, and then the one that rounds rows."""

from __future__ import annotations

import pytest
import torch

from minisgl.kernels.norm import add_and_norm, silu_and_mul
from minisgl.kernels.quantized_linear import quantize_rows
from minisgl.kernels.rounding import add_norm_and_round, silu_mul_and_round
from tests.kernels.closeness import random, spread

EPS = 1e-5

every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])


def assert_same_rows(found: tuple[torch.Tensor, ...], rows: torch.Tensor) -> None:
    for ours, expected in zip(found, quantize_rows(rows), strict=True):
        assert ours.dtype == expected.dtype
        assert torch.equal(ours.view(torch.uint8), expected.view(torch.uint8))


@every_dtype
@pytest.mark.parametrize("size", [16, 48, 128, 1024, 5120])
def test_a_norm_rounds_what_it_would_have_written(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = random(5, size, dtype=dtype), random(5, size, dtype=dtype, seed=1), random(size, dtype=dtype)
    x[1], residual[1], x[2, 0] = 0.0, 0.0, 3000.0
    for stream in (residual, None):
        normed, expected = add_and_norm(x, stream, weight, EPS)
        *rounded, total = add_norm_and_round(x, stream, weight, EPS)
        assert_same_rows(tuple(rounded), normed)
        assert torch.equal(total, expected)
        assert (total is x) == (stream is None)


@every_dtype
@pytest.mark.parametrize("size", [16, 48, 128, 1088, 3072, 17408])
def test_an_activation_rounds_what_it_would_have_written(dtype: torch.dtype, size: int) -> None:
    """Rows that are two tiles, exactly, or end inside of one; the largest number in either."""
    gate_up = random(4, 2 * size, dtype=dtype) * 4
    gate_up[1], gate_up[2, [0, size]], gate_up[3, [size - 1, -1]] = 0.0, 90.0, 90.0
    assert_same_rows(silu_mul_and_round(gate_up), silu_and_mul(gate_up))


def test_rows_may_lie_apart() -> None:
    x, residual, gate_up = (random(3, 96, dtype=torch.bfloat16, seed=seed) for seed in range(3))
    weight = random(96, dtype=torch.bfloat16)
    *rounded, total = add_norm_and_round(spread(x), spread(residual), weight, EPS)
    normed, expected = add_and_norm(x, residual, weight, EPS)
    assert_same_rows(tuple(rounded), normed)
    assert torch.equal(total, expected)
    assert_same_rows(silu_mul_and_round(spread(gate_up)), silu_and_mul(gate_up))
