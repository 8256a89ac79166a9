"""Kernels with quantised weights, against float64 of the dequantised weight, in every scheme and shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl.kernels import quantized_linear as kernels
from minisgl.kernels.quantized_linear import (
    SCALE_AFTERWARDS_TOKENS,
    dequantize,
    fp8_linear,
    int4_linear,
    int8_linear,
    quantize_rows,
    scale_product,
)
from minisgl.kernels.single_token_quantized import quantized_linear
from minisgl.layers.quantizers import FP8_MAX, Fp8, Fp8Block, Int4, Int4ZeroPoint, Int8, to_fp8
from tests.kernels.closeness import DEVICE, TOLERANCE, assert_close, random

SCHEMES: dict[str, Any] = {
    "fp8": Fp8(),
    "fp8-block": Fp8Block((32, 32)),
    "int8": Int8(),
    "int8-groups": Int8(32),
    "int4": Int4(32),
    "int4-64": Int4(64),
    "int4-zero-point": Int4ZeroPoint(32),
    "int4-row": Int4(0),
}
# Twins dequantise in float32, so float64 cannot be compared.
every_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def quantized(name: str, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[int, int]]:
    """The tensors, the float64 weight they stand for, and the block of weights that share a scale."""
    quantizer = SCHEMES[name]
    weight = random(rows, columns, dtype=torch.float32, seed=1) / columns**0.5
    tensors = quantizer.quantize(weight)
    scales = quantizer.layout(columns)["weight_scale"]
    return tensors, quantizer.dequantize(tensors).double(), (scales.rows, scales.columns)


def product(name: str, x: torch.Tensor, tensors: dict[str, torch.Tensor], bias: torch.Tensor | None) -> torch.Tensor:
    weight, scale = tensors["weight"], tensors["weight_scale"]
    if name.startswith("fp8"):
        return fp8_linear(x, weight, scale, SCHEMES[name].block, bias, False)
    if name.startswith("int8"):
        return int8_linear(x, weight, scale, SCHEMES[name].group_size, bias)
    return int4_linear(x, weight, scale, tensors.get("weight_zero"), bias)


@every_scheme
@pytest.mark.parametrize(("tokens", "rows", "columns"), [(1, 40, 128), (5, 96, 64), (33, 72, 192)])
def test_products_of_every_shape(name: str, tokens: int, rows: int, columns: int) -> None:
    tensors, weight, _ = quantized(name, rows, columns)
    x, bias = random(tokens, columns, dtype=torch.float32), random(rows, dtype=torch.float32, seed=2)
    assert_close(product(name, x, tensors, None), F.linear(x.double(), weight), torch.float32)
    assert_close(product(name, x, tensors, bias), F.linear(x.double(), weight, bias.double()), torch.float32)
    assert product(name, x[:0], tensors, bias).shape == (0, rows)


@every_scheme
@every_dtype
def test_products_of_every_dtype(name: str, dtype: torch.dtype) -> None:
    tensors, weight, _ = quantized(name, 64, 64)
    x = random(3, 64, dtype=dtype)
    assert_close(product(name, x, tensors, None), F.linear(x.double(), weight), dtype)


@every_scheme
@pytest.mark.parametrize("programs", [1, 12])
def test_one_program_or_several_share_a_sum(name: str, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "_PROGRAMS", programs)
    monkeypatch.setattr(kernels, "_MAX_SPLITS", 3)  # which does not divide the number of chunks
    tensors, weight, _ = quantized(name, 24, 1280)
    x, bias = random(2, 1280, dtype=torch.float32), random(24, dtype=torch.float32, seed=2)
    assert_close(product(name, x, tensors, bias), F.linear(x.double(), weight, bias.double()), torch.float32)


@every_scheme
def test_many_tokens_meet_a_weight_that_was_written_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "DEQUANTIZE_TOKENS", {4: 20, 8: 20})
    tensors, weight, block = quantized(name, 40, 128)
    x = random(20, 128, dtype=torch.float32)
    out = dequantize(x, tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), block)
    assert_close(out, weight, torch.float32)
    assert_close(product(name, x, tensors, None), F.linear(x.double(), weight), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_rounded_as_the_twin_does(dtype: torch.dtype) -> None:
    x = random(7, 100, dtype=dtype)
    x[2], x[3] = 0.0, x[3] * 1e4
    numbers, scale = quantize_rows(x)
    expected = x.float().abs().amax(dim=1, keepdim=True).clamp(min=1e-12) / FP8_MAX
    torch.testing.assert_close(scale, expected)
    torch.testing.assert_close(numbers.float(), to_fp8(x.float() / expected).float(), rtol=0.07, atol=0.01)
    error = (numbers.double() * scale.double() - x.double()).norm() / x.double().norm()
    assert float(error) < 0.03


def test_an_outlier_costs_other_tokens_nothing() -> None:
    x = random(4, 96, dtype=torch.float32)
    before, before_scale = quantize_rows(x)
    x[1, 7] = -3000.0
    after, after_scale = quantize_rows(x)
    others = [0, 2, 3]
    assert torch.equal(after.float()[others], before.float()[others])
    assert torch.equal(after_scale[others], before_scale[others])
    assert float(after[1, 7]) * float(after_scale[1]) == pytest.approx(-3000.0)


# -- one token ---------------------------------------------------------------------------------------------------------


@every_scheme
@pytest.mark.parametrize("width", [64, 192, 640])
def test_a_single_token(name: str, width: int) -> None:
    tensors, weight, block = quantized(name, 24, width)
    x, out = random(width, dtype=torch.float32), torch.empty(24, device=DEVICE)
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    quantized_linear(x, tensors["weight"], scale, zero, block, out)
    assert_close(out, weight @ x.double(), torch.float32)


@every_scheme
@every_dtype
def test_all_that_is_fused_with_a_single_token(name: str, dtype: torch.dtype) -> None:
    rows, width = 16, 128
    tensors, weight, block = quantized(name, 2 * rows, width)
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    x, norm = random(width, dtype=dtype), 1.0 + random(width, dtype=dtype, seed=3) / 4
    bias, residual = random(2 * rows, dtype=dtype, seed=4), random(rows, dtype=dtype, seed=5)
    normed = F.rms_norm(x.double(), (width,), norm.double(), 1e-5)
    gate, up = (weight @ normed + bias.double()).chunk(2)
    out = torch.empty(rows, dtype=dtype, device=DEVICE)
    quantized_linear(x, tensors["weight"], scale, zero, block, out, bias=bias, norm=norm, eps=1e-5, gated=True)
    assert_close(out, F.silu(gate) * up, dtype)
    stream = torch.cat([residual, residual])
    expected = weight @ x.double() + bias.double() + stream.double()
    quantized_linear(x, tensors["weight"], scale, zero, block, stream, bias=bias, residual=stream)
    assert_close(stream, expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 16, 17, 256, 2000])
@pytest.mark.parametrize("name", ["fp8", "fp8-block", "int8", "int8-groups", "int4", "int4-zero-point"])
def test_a_quantiser_on_a_gpu_computes_what_its_twin_does(name: str, tokens: int) -> None:
    quantizer = SCHEMES[name]
    weight = random(512, 1024, dtype=torch.float32, seed=1) / 32
    tensors, x = quantizer.quantize(weight), random(tokens, 1024, dtype=torch.bfloat16)
    bias = random(512, dtype=torch.bfloat16, seed=2)
    on_cpu = {key: tensor.cpu() for key, tensor in tensors.items()}
    expected = quantizer.linear(x.cpu(), on_cpu, bias.cpu()).to(DEVICE)
    out = quantizer.linear(x, tensors, bias)
    assert out.dtype == torch.bfloat16
    tolerance = 2e-2 if name == "int8" else TOLERANCE[torch.bfloat16]  # whose twin rounds activations
    assert float((out.double() - expected.double()).norm() / expected.double().norm()) < tolerance


@pytest.mark.parametrize("rows", [40, 1100])  # less than a program's outputs, and more
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_scaled_afterwards(rows: int, with_bias: bool) -> None:
    product = random(3, rows, dtype=torch.bfloat16)
    x_scale, weight_scale = random(3, 1, dtype=torch.float32, seed=2), random(rows, 1, dtype=torch.float32, seed=3)
    bias = random(rows, dtype=torch.bfloat16, seed=4) if with_bias else None
    expected = product.double() * x_scale.double() * weight_scale.double().T
    if bias is not None:
        expected += bias.double()
    scale_product(product, x_scale, weight_scale, bias)
    assert_close(product, expected, torch.bfloat16)
    scale_product(product[:0], x_scale[:0], weight_scale, bias)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [17, SCALE_AFTERWARDS_TOKENS, SCALE_AFTERWARDS_TOKENS + 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_fp8_tensor_cores_multiply_what_was_rounded(tokens: int, dtype: torch.dtype) -> None:
    tensors, weight, _ = quantized("fp8", 96, 1024)
    x, bias = random(tokens, 1024, dtype=dtype) * 100, random(96, dtype=dtype, seed=2)
    numbers, scale = quantize_rows(x)
    expected = F.linear(numbers.double() * scale.double(), weight, bias.double())
    out = fp8_linear(x, tensors["weight"], tensors["weight_scale"], (1, 0), bias, True)
    assert out.dtype == dtype
    # Once rounded before it is scaled, and once after.
    torch.testing.assert_close(out.double(), expected, rtol=2**-7, atol=2**-7 * float(expected.abs().mean()))
