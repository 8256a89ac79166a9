from __future__ import annotations

import pytest
import torch

from minisgl.layers.norm import RMSNorm


def make_norm(size: int, dtype: torch.dtype) -> RMSNorm:
    norm = RMSNorm(size, eps=1e-5).to(dtype)
    norm.weight.copy_(torch.linspace(0.5, 2.0, size))
    return norm


def reference(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 8e-3)]
)
def test_equals_the_formula_in_float64(dtype: torch.dtype, tolerance: float) -> None:
    norm = make_norm(64, dtype)
    x = torch.randn(5, 3, 64, dtype=dtype)
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), reference(norm, x), rtol=tolerance, atol=tolerance)


def test_half_precision_squares_do_not_overflow() -> None:
    norm = make_norm(8, torch.float16)
    out = norm(torch.full((1, 8), 3e4, dtype=torch.float16))  # 9e8 is beyond float16
    torch.testing.assert_close(out[0], norm.weight.data)


def test_add_and_norm_returns_the_new_residual() -> None:
    norm = make_norm(16, torch.float64)
    x, residual = torch.randn(2, 4, 16, dtype=torch.float64)
    before = residual.clone()
    normed, total = norm.add_and_norm(x, residual)
    torch.testing.assert_close(total, x + before)
    torch.testing.assert_close(normed, reference(norm, x + before))


def test_the_stream_starts_without_a_residual() -> None:
    norm = make_norm(16, torch.float64)
    x = torch.randn(4, 16, dtype=torch.float64)
    normed, total = norm.add_and_norm(x, None)
    assert total is x
    torch.testing.assert_close(normed, reference(norm, x))
