"""SiLU·mul as one kernel against float64 and against the plain function."""

from __future__ import annotations

import pytest
import torch

from minisgl import layers
from minisgl.kernels.activation import silu_and_mul
from tests.kernels.closeness import assert_close, every_dtype, random, spread


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
    plain = layers.silu_and_mul(gate_up).double()
    assert float((out.double() - plain).norm() / plain.norm()) < 2 * torch.finfo(dtype).eps


def test_large_gates_neither_overflow_nor_vanish() -> None:
    gate_up = torch.tensor([[-200.0, -90.0, 90.0, 200.0, 1.0, 1.0, 1.0, 1.0]]).to(random(1, dtype=torch.float32).device)
    assert silu_and_mul(gate_up).tolist() == [[pytest.approx(0, abs=1e-30), pytest.approx(0, abs=1e-30), 90.0, 200.0]]


def test_rows_may_lie_apart() -> None:
    gate_up = random(5, 80, dtype=torch.float32)
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_close(silu_and_mul(spread(gate_up)), gate * gate.sigmoid() * up, torch.float32)
