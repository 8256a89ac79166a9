"""Pictures of stored numbers: what they say is what the bits mean."""

from __future__ import annotations

import pytest
import torch

from minisgl.book import Stored, nibbles, number_bits, number_line
from minisgl.book.numbers import rounding_error
from minisgl.layers.quantizers import to_fp8
from tests.book.drawing import assert_sound, boxes, texts


@pytest.mark.parametrize(
    ("number", "bits", "meaning"),
    [
        (torch.tensor(-1.5), "1" + "01111111" + "1" + "0" * 22, -1.5),
        (torch.tensor(1.5, dtype=torch.bfloat16), "0011111111000000", 1.5),
        (torch.tensor(0.15625, dtype=torch.float16), "0011000100000000", 0.15625),
        (to_fp8(torch.tensor(-448.0)), "11111110", -448.0),
        (torch.tensor(-3, dtype=torch.int8), "11111101", -3.0),
        (torch.tensor(13, dtype=torch.uint8), "1101", 13.0),
    ],
)
def test_bits_are_those_of_the_format(number: torch.Tensor, bits: str, meaning: float) -> None:
    assert Stored(number).bits == bits
    assert Stored(number, 0.5, 8.0).meaning == 0.5 * (meaning - 8.0)


def test_a_weight_has_a_box_for_each_bit() -> None:
    formats = {
        "bfloat16": Stored(torch.tensor(-0.03, dtype=torch.bfloat16)),
        "int8": Stored(torch.tensor(-50, dtype=torch.int8), 0.0006),
        "int4": Stored(torch.tensor(5, dtype=torch.uint8), 0.01, 8.0),
    }
    picture = number_bits(-0.03, formats)
    assert_sound(picture)
    assert len(boxes(picture)) == 16 + 8 + 4 + 4
    assert "int8: 11001110, 0.0006 × -50 = -0.030000, an error of 0.00%." in picture.text
    assert "int4: 0101, 0.01 × (5 − 8) = -0.030000" in picture.text


def test_a_grid_has_a_stroke_for_each_number() -> None:
    picture = number_line(torch.linspace(-1, 1, 50), {"int4": [-1.0, -0.5, 0.0, 0.5, 1.0]}, "Weights")
    assert_sound(picture)
    assert "int4: 5 numbers from -1 to 1." in picture.text
    assert picture.svg.count("v20") == 5


def test_nibbles_are_read_from_the_lowest_bits() -> None:
    picture = nibbles({"AWQ": (0x7531_6420, (0, 2, 4, 6, 1, 3, 5, 7))})
    assert_sound(picture)
    assert "column 0 is 0, column 2 is 2, column 4 is 4, column 6 is 6, column 1 is 1" in picture.text
    assert "0111 = 7" in texts(picture)
    assert "0x75316420" in texts(picture)


def test_the_error_is_that_of_the_nearest_integers() -> None:
    """With 3 bits and 3 as the largest weight a step is 1; 0.25 and 1.25 each are a quarter too large."""
    weight = torch.tensor([[0.25, -3.0, 1.25, 3.0]])
    measured, _ = rounding_error(weight, 3, 4)
    assert measured == pytest.approx((2 * 0.25**2 / float(weight.square().sum())) ** 0.5)


def test_a_bit_less_doubles_the_error_and_the_equation_says_so() -> None:
    weight = 2 * torch.rand(64, 256, generator=torch.Generator().manual_seed(0)) - 1
    errors = [rounding_error(weight, bits, 64) for bits in (8, 7, 6, 5, 4)]
    assert [measured for measured, _ in errors] == pytest.approx([expected for _, expected in errors], rel=0.03)
    assert errors[1][0] / errors[0][0] == pytest.approx(127 / 63, rel=0.03)


def test_each_group_has_its_own_step() -> None:
    """A large group does not make the steps of a small one coarse: alone, both have the same relative error."""
    small = torch.rand(8, 32, generator=torch.Generator().manual_seed(1))
    weight = torch.cat([small, 3 * small], dim=1)
    assert rounding_error(weight, 4, 32) == pytest.approx(rounding_error(small, 4, 32))
    assert rounding_error(weight, 4, 64)[0] > 1.2 * rounding_error(weight, 4, 32)[0]
