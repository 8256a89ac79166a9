"""Scales, groups and packing of the schemes: numbers that can be checked by hand. What all share: tests/contracts."""

from __future__ import annotations

import pytest
import torch

from minisgl.layers import quantizers
from minisgl.layers.quantizers import WEIGHT_ONLY_TOKENS, Int8, pack_int4, unpack_int4


def test_a_group_is_divided_by_its_own_scale() -> None:
    weight = torch.tensor([[127.0, -1.0, 0.5, -0.25], [-1.27, 0.64, 254.0, 2.0]])
    tensors = Int8(2).quantize(weight)
    assert tensors["weight"].tolist() == [[127, -1, 127, -64], [-127, 64, 127, 1]]
    torch.testing.assert_close(tensors["weight_scale"], torch.tensor([[1.0, 0.5 / 127], [0.01, 2.0]]))
    assert Int8().quantize(weight)["weight"].tolist() == [[127, -1, 0, 0], [-1, 0, 127, 1]]


@pytest.mark.parametrize("group_size", [0, 32])
def test_no_weight_is_further_than_half_a_step(group_size: int) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    quantizer = Int8(group_size)
    tensors = quantizer.quantize(weight)
    steps = tensors["weight_scale"].repeat_interleave(group_size or 96, dim=1)
    error = (quantizer.dequantize(tensors) - weight).abs() / steps
    assert 0.45 < float(error.max()) <= 0.5 + 1e-4
    assert float(error.mean()) == pytest.approx(0.25, abs=0.02)


def test_a_group_of_zeros_stays_one() -> None:
    tensors = Int8(2).quantize(torch.tensor([[0.0, 0.0, 3.0, 0.0]]))
    assert tensors["weight"].tolist() == [[0, 0, 127, 0]]
    assert bool(tensors["weight_scale"].isfinite().all())


@pytest.mark.parametrize("columns", [31, 33, 64, 192])
@pytest.mark.parametrize("tokens", [1, 3, WEIGHT_ONLY_TOKENS + 1])
def test_int8_needs_no_instructions_for_it(columns: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older CPUs multiply by floats; of rows that do not fill a register, PyTorch's product would read too much."""
    monkeypatch.setattr(quantizers, "_INT8_PRODUCTS", False)
    generator = torch.Generator().manual_seed(columns)
    weight, x = (torch.randn(count, columns, generator=generator) for count in (8, tokens))
    quantizer = Int8()
    tensors = quantizer.prepack(quantizer.quantize(weight))
    expected = x @ weight.T
    assert float((quantizer.linear(x, tensors, None) - expected).norm() / expected.norm()) < 0.06
    assert float((quantizer.linear(x, tensors, torch.ones(8)) - 1 - expected).norm() / expected.norm()) < 0.06
    assert quantizer.linear(x[:0], tensors, None).shape == (0, 8)


def test_halves_of_a_group_share_bytes() -> None:
    numbers = torch.tensor([[[1, 2, 3, 4], [15, 0, 5, 10]]], dtype=torch.uint8)
    assert pack_int4(numbers).tolist() == [[0x31, 0x42, 0x5F, 0xA0]]


def test_what_is_packed_comes_back() -> None:
    numbers = torch.randint(0, 16, (3, 4, 32), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    packed = pack_int4(numbers)
    assert packed.shape == (3, 64)
    assert packed.dtype == torch.uint8
    assert torch.equal(unpack_int4(packed, 4), numbers)


def test_a_group_is_packed_as_if_it_were_alone() -> None:
    numbers = torch.randint(0, 16, (2, 3, 8), generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    alone = [pack_int4(numbers[:, group : group + 1]) for group in range(3)]
    assert torch.equal(pack_int4(numbers), torch.cat(alone, dim=1))
