"""Inputs for kernels, and how far their results may be from float64."""

from __future__ import annotations

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter cuts bfloat16 off where hardware rounds it, which doubles the error.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 6e-3}

every_dtype = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype).removeprefix("torch."))


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Normal numbers, made on the CPU so that they are the same everywhere."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(DEVICE)


def spread(rows: torch.Tensor) -> torch.Tensor:
    """The same rows, [T, n], as a view of memory that has NaN between them."""
    wider = torch.full((len(rows), 2 * rows.shape[1] + 3), torch.nan, dtype=rows.dtype, device=rows.device)
    view = wider[:, 1 : rows.shape[1] + 1]
    view.copy_(rows)
    return view


def assert_close(out: torch.Tensor, reference: torch.Tensor, dtype: torch.dtype) -> None:
    """``‖out − reference‖ ≤ tolerance × ‖reference‖``, which no NaN passes."""
    assert out.dtype == dtype
    assert reference.dtype == torch.float64
    error = float((out.double() - reference).norm() / reference.norm())
    assert error <= TOLERANCE[dtype], f"a relative error of {error:.2g}, where {TOLERANCE[dtype]:.2g} is allowed"
