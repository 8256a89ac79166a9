"""What every quantiser must fulfil: near the weight, parts are parts of the whole, rows are independent."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from minisgl.layers.quantization import QUANTIZERS, Quantizer
from minisgl.registry import resolve

CONTRACTS = {"make_quantizer": (QUANTIZERS, Quantizer)}

MakeQuantizer = Callable[[], Quantizer]
ROWS, COLUMNS = 256, 512


@pytest.fixture
def make_quantizer(request: pytest.FixtureRequest) -> MakeQuantizer:
    return resolve("--impl", request.param, QUANTIZERS)


def random_weight(rows: int = ROWS, columns: int = COLUMNS, seed: int = 0) -> torch.Tensor:
    """Rows of different sizes, and off the centre, as real ones are."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.rand(rows, 1, generator=generator) + 0.5
    return 0.02 * size * (torch.randn(rows, columns, generator=generator) + 0.3)


def random_input(tokens: int, columns: int = COLUMNS, seed: int = 1) -> torch.Tensor:
    return torch.randn(tokens, columns, generator=torch.Generator().manual_seed(seed))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def test_the_tensors_are_those_of_the_layout(make_quantizer: MakeQuantizer) -> None:
    quantizer = make_quantizer()
    layout = quantizer.layout(COLUMNS)
    for name, tensor in quantizer.quantize(random_weight()).items():
        assert tuple(tensor.shape) == layout[name].shape(ROWS, COLUMNS), f"the shape of {name}"
        assert tensor.dtype == layout[name].dtype, f"the dtype of {name}"
    assert list(layout) == list(quantizer.quantize(random_weight()))


def test_it_takes_little_more_than_half_of_bfloat16(make_quantizer: MakeQuantizer) -> None:
    tensors = make_quantizer().quantize(random_weight())
    assert sum(tensor.nbytes for tensor in tensors.values()) <= 1.05 * ROWS * COLUMNS


def test_what_comes_back_is_near(make_quantizer: MakeQuantizer) -> None:
    quantizer, weight = make_quantizer(), random_weight()
    back = quantizer.dequantize(quantizer.quantize(weight))
    assert back.dtype == torch.float32
    assert error(back, weight) < 0.15
    assert float((back - weight).mean().abs()) < 0.01 * float(weight.std()), "numbers are rounded, not cut"


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_nothing_depends_on_the_size_of_a_weight(make_quantizer: MakeQuantizer, scale: float) -> None:
    quantizer, weight = make_quantizer(), random_weight() * scale
    assert error(quantizer.dequantize(quantizer.quantize(weight)), weight) < 0.15


def test_extremes_survive(make_quantizer: MakeQuantizer) -> None:
    quantizer, weight = make_quantizer(), random_weight()
    weight[0, 0], weight[1, 1], weight[2] = 5.0, -5.0, 0.0
    back = quantizer.dequantize(quantizer.quantize(weight))
    assert bool(back.isfinite().all())
    assert float(back[0, 0]) == pytest.approx(5.0, rel=0.1)
    assert float(back[1, 1]) == pytest.approx(-5.0, rel=0.1)
    assert float(back[2].abs().max()) < 1e-2
    zeros = torch.zeros(ROWS, COLUMNS)
    assert torch.equal(quantizer.dequantize(quantizer.quantize(zeros)), zeros)


def test_what_is_quantised_already_stays_as_it_is(make_quantizer: MakeQuantizer) -> None:
    quantizer = make_quantizer()
    once = quantizer.dequantize(quantizer.quantize(random_weight()))
    twice = quantizer.dequantize(quantizer.quantize(once))
    assert error(twice, once) < 0.02


def test_parts_are_those_of_the_whole(make_quantizer: MakeQuantizer) -> None:
    """Ranks cut tensors, and merged projections lay them one below the other."""
    quantizer, weight = make_quantizer(), random_weight()
    tensors, layout = quantizer.quantize(weight), quantizer.layout(COLUMNS)
    whole = quantizer.dequantize(tensors)
    rows = slice(128, 256)
    below = {name: tensor[layout[name].region(rows, slice(0, COLUMNS))] for name, tensor in tensors.items()}
    assert torch.equal(quantizer.dequantize(below), whole[rows])
    alone = quantizer.quantize(weight[rows])
    assert all(torch.equal(alone[name].float(), below[name].float()) for name in below)
    columns = slice(256, 512)
    right = {name: tensor[layout[name].region(rows, columns)] for name, tensor in tensors.items()}
    assert torch.equal(quantizer.dequantize(right), whole[rows, columns])


@pytest.mark.parametrize("tokens", [0, 1, 3, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_product_is_that_of_the_weight(
    make_quantizer: MakeQuantizer, tokens: int, dtype: torch.dtype, with_bias: bool
) -> None:
    quantizer = make_quantizer()
    tensors = quantizer.quantize(random_weight())
    x = random_input(tokens).to(dtype)
    bias = 10.0 + torch.arange(ROWS).to(dtype) if with_bias else None
    expected = x.float() @ quantizer.dequantize(tensors).T
    for laid_out in (tensors, quantizer.prepack(tensors)):
        given = x.clone()
        out = quantizer.linear(given, laid_out, bias)
        assert out.shape == (tokens, ROWS)
        assert out.dtype == dtype
        assert torch.equal(given, x), "the input is not written to"
        if tokens:
            got = out.float() if bias is None else out.float() - bias.float()
            # bfloat16 has 8 bits, of a sum as large as the bias.
            rounding = 0.0 if bias is None or dtype == torch.float32 else 0.6
            assert float((got - expected).norm() / expected.norm()) < 0.03 + rounding


def test_prepacking_leaves_the_tensors(make_quantizer: MakeQuantizer) -> None:
    quantizer = make_quantizer()
    tensors = quantizer.quantize(random_weight())
    before = quantizer.dequantize(tensors)
    quantizer.prepack(tensors)
    assert torch.equal(quantizer.dequantize(tensors), before)


@pytest.mark.parametrize("tokens", [2, 40])
def test_a_row_does_not_depend_on_the_others(make_quantizer: MakeQuantizer, tokens: int) -> None:
    """A request with an outlier must not cost the others of its batch their precision."""
    quantizer = make_quantizer()
    tensors = quantizer.quantize(random_weight())
    x = random_input(tokens)
    among_others = quantizer.linear(x, tensors, None)
    x[1] *= 1e4
    beside_a_large_one = quantizer.linear(x, tensors, None)
    kept = [row for row in range(tokens) if row != 1]
    torch.testing.assert_close(beside_a_large_one[kept], among_others[kept], rtol=1e-4, atol=1e-5)


def test_a_token_of_zeros_is_the_bias(make_quantizer: MakeQuantizer) -> None:
    quantizer = make_quantizer()
    tensors = quantizer.quantize(random_weight())
    for tokens in (1, 40):
        out = quantizer.linear(torch.zeros(tokens, COLUMNS), tensors, torch.arange(ROWS).float())
        torch.testing.assert_close(out, torch.arange(ROWS).float().expand(tokens, ROWS))
