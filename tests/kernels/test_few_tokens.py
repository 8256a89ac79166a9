"""The kernel for few tokens and quantised weights, against float64 of the dequantised weight."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from minisgl.engine.cuda_graph import CudaGraphCapture
from minisgl.kernels import few_tokens
from minisgl.layers.quantizers import Fp8, Fp8Block, Int4, Int4ZeroPoint, Int8
from tests.kernels.closeness import DEVICE, assert_close, random

SCHEMES: dict[str, Any] = {
    "fp8": Fp8(),
    "fp8-block": Fp8Block(),
    "int4": Int4(128),
    "int4-256": Int4(256),
    "int4-row": Int4(0),
    "int4-zero-point": Int4ZeroPoint(128),
}
every_scheme = pytest.mark.parametrize("name", SCHEMES)


def quantized(name: str, rows: int, columns: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, tuple[int, int]]:
    """The tensors, the float64 weight they stand for, and the block of weights that share a scale."""
    quantizer = SCHEMES[name]
    weight = random(rows, columns, dtype=torch.float32, seed=1) / columns**0.5
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


@pytest.mark.gpu
@every_scheme
@pytest.mark.parametrize("tokens", [1, 3, 8])
@pytest.mark.parametrize(("rows", "columns"), [(16, 256), (48, 1280), (6144, 768), (6160, 5120)])
def test_products_of_every_shape(name: str, tokens: int, rows: int, columns: int) -> None:
    tensors, weight, block = quantized(name, rows, columns)
    scale, zero = tensors["weight_scale"], tensors.get("weight_zero")
    x, bias = random(tokens, columns, dtype=torch.bfloat16), random(rows, dtype=torch.bfloat16, seed=2)
    assert few_tokens.fits(x, tensors["weight"], block)
    out = torch.empty(tokens, rows, dtype=torch.bfloat16, device=DEVICE)
    few_tokens.linear(x, tensors["weight"], scale, zero, block, out)
    assert_close(out, F.linear(x.double(), weight), torch.bfloat16)
    few_tokens.linear(x, tensors["weight"], scale, zero, block, out, bias=bias)
    assert_close(out, F.linear(x.double(), weight, bias.double()), torch.bfloat16)


@pytest.mark.gpu
@every_scheme
def test_all_that_is_fused_with_a_single_token(name: str) -> None:
    """Behind each other in a graph, where each is launched before the one in front has ended."""
    width = 1024
    tensors, weight, block = quantized(name, 2 * width, width)
    gate_up = (tensors["weight"], tensors["weight_scale"], tensors.get("weight_zero"), block)
    down = tuple(None if each is None else each[: len(each) // 2] for each in gate_up[:3])
    x, norm = random(width, dtype=torch.bfloat16), 1.0 + random(width, dtype=torch.bfloat16, seed=3) / 4
    bias = random(2 * width, dtype=torch.bfloat16, seed=4)
    stream, hidden = x.clone(), torch.empty_like(x)

    def layer() -> tuple[torch.Tensor, ...]:
        few_tokens.linear(stream, *gate_up, hidden, bias=bias, norm=norm, eps=1e-5, gated=True)
        few_tokens.linear(hidden, *down, block, stream, bias=bias[:width], residual=stream)
        return stream, hidden

    graph = CudaGraphCapture(torch.device(DEVICE))(layer)
    for _ in range(20):
        stream.copy_(x)
        graph.replay()
        graph.replay()
        expected = x.double()
        for _ in range(2):
            gate, up = (weight @ F.rms_norm(expected, (width,), norm.double(), 1e-5) + bias.double()).chunk(2)
            inner = F.silu(gate) * up
            expected = weight[:width] @ inner + bias[:width].double() + expected
        assert float((hidden.double() - inner).norm() / inner.norm()) < 0.02
        assert float((stream.double() - expected).norm() / expected.norm()) < 0.02
