"""The kernel for few tokens and quantised weights, against float64 of the dequantised weight.

On a GPU, and in small shapes emulated on the CPU, which tests what it computes wherever there is a C++ compiler.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernels import few_tokens
from minisgl.layers.quantizers import Fp8, Fp8Block, Int4, Int4ZeroPoint, Int8
from tests.kernels.closeness import DEVICE, assert_close, random
from tests.kernels.emulated import EmulatedKernel

SCHEMES: dict[str, Any] = {
    "fp8": Fp8(),
    "fp8-block": Fp8Block(),
    "int4": Int4(128),
    "int4-256": Int4(256),
    "int4-row": Int4(0),
    "int4-zero-point": Int4ZeroPoint(128),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def quantized(
    name: str, rows: int, columns: int, device: str = DEVICE
) -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[int, int]]:
    """The tensors, the float64 weight they stand for, and the block of weights that share a scale."""
    quantizer = SCHEMES[name]
    weight = random(rows, columns, dtype=torch.float32, seed=1).to(device) / columns**0.5
    weight[:, 0] *= 1e-3  # numbers of e4m3 without a leading 1
    tensors = quantizer.quantize(weight)
    scales = quantizer.layout(columns)["weight_scale"]
    return tensors, quantizer.dequantize(tensors).double(), (scales.rows, scales.columns)


def test_what_it_leaves_to_others() -> None:
    """On a CPU all; on a GPU other dtypes, many tokens, groups that are no whole segment, and int8."""
    x = random(8, 512, dtype=torch.bfloat16)
    weight = Fp8().quantize(random(32, 512, dtype=torch.float32))["weight"]
    assert few_tokens.fits(x, weight, (1, 0)) == (DEVICE == "cuda")
    assert not few_tokens.fits(x.float(), weight, (1, 0))
    assert not few_tokens.fits(torch.cat([x, x]), weight, (1, 0))
    assert not few_tokens.fits(x[:0], weight, (1, 0))
    assert not few_tokens.fits(x, weight[:24], (1, 0))
    assert not few_tokens.fits(x, weight, (1, 32))
    assert not few_tokens.fits(x, Int8().quantize(random(32, 512, dtype=torch.float32))["weight"], (1, 0))


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products of tensors on the CPU; blocks have two tiles from 64 rows on."""
    monkeypatch.setattr(few_tokens, "_MANY_ROWS", 64)
    monkeypatch.setattr(few_tokens, "CudaKernel", EmulatedKernel)
    monkeypatch.setattr(few_tokens, "_compile", few_tokens._compile.__wrapped__)  # the emulation has a cache of its own


def check_product(name: str, tokens: int, rows: int, columns: int, biased: bool, device: str) -> None:
    tensors, weight, block = quantized(name, rows, columns, device)
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    x = random(tokens, columns, dtype=torch.bfloat16).to(device)
    bias = random(rows, dtype=torch.bfloat16, seed=2).to(device) if biased else None
    assert few_tokens.fits(x, tensors["weight"], block) == x.is_cuda
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=device)
    few_tokens.linear(x, tensors["weight"], scale, zero, block, out, bias=bias)
    assert_close(out, F.linear(x.double(), weight, None if bias is None else bias.double()), torch.bfloat16)


@pytest.mark.gpu
@every_scheme
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (48, 1280), (6144, 768), (6160, 5120)])
def test_products_of_every_shape(name: str, tokens: int, rows: int, columns: int) -> None:
    for biased in (False, True):
        check_product(name, tokens, rows, columns, biased, DEVICE)


@pytest.mark.usefixtures("emulated")
@every_scheme
@pytest.mark.parametrize(
    ("tokens", "rows", "columns", "biased"),
    [(1, 16, 256, False), (3, 48, 1280, True), (8, 48, 1280, False), (3, 64, 512, True)],
)
def test_products_emulated(name: str, tokens: int, rows: int, columns: int, biased: bool) -> None:
    check_product(name, tokens, rows, columns, biased, "cpu")
