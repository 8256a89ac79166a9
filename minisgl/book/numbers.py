"""Numbers as they are stored: bit by bit, as marks on a line, and several in one word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, digits, request_colors

_FIELDS = {
    torch.float32: ("sign", *["exponent"] * 8, *["fraction"] * 23),
    torch.float16: ("sign", *["exponent"] * 5, *["fraction"] * 10),
    torch.bfloat16: ("sign", *["exponent"] * 8, *["fraction"] * 7),
    torch.float8_e4m3fn: ("sign", *["exponent"] * 4, *["fraction"] * 3),
    torch.int8: ("integer",) * 8,
    torch.uint8: ("integer",) * 4,
}
"""What each bit is for, the highest first. A byte stands for the number of 4 bits that is in it."""
_COLORS = {"sign": 5, "exponent": 4, "fraction": 1, "integer": 2}
_BIT = 15.0
_NIBBLE = 82.0


class Stored(NamedTuple):
    """One number of a tensor, and how it is read: ``scale × (number − zero)``."""

    number: torch.Tensor  # with one element, of a dtype that the number is stored in; uint8 for 4 bits
    scale: float = 1.0
    zero: float = 0.0

    @property
    def bits(self) -> str:
        """The highest first."""
        size = self.number.element_size()
        integer = int.from_bytes(bytes(self.number.reshape(1).view(torch.uint8).tolist()), "little")
        return f"{integer:0{8 * size}b}"[-len(_FIELDS[self.number.dtype]) :]

    @property
    def meaning(self) -> float:
        """What it stands for."""
        return self.scale * (float(self.number) - self.zero)

    @property
    def formula(self) -> str:
        """How that is computed."""
        if self.scale == 1.0:
            return f"{self.meaning:.6f}"
        number = digits(float(self.number))
        if self.zero:
            number = f"({number} − {digits(self.zero)})"
        return f"{digits(self.scale)} × {number} = {self.meaning:.6f}"


def rounding_error(weight: torch.Tensor, bits: int, group: int) -> tuple[float, float]:
    """The error of a weight, [N, K], as integers of so many bits with a scale for each ``group`` weights of a row.

    Integers go as far down as up, so the largest weight of a group becomes 2^(bits − 1) − 1, up to its sign.

    Returns:
        The root mean square of the error, as a share of the weight's own: measured, and as s / √12 says it, where s is
        the step of a group.
    """
    groups = weight.unflatten(1, (-1, group))
    step = groups.abs().amax(dim=2, keepdim=True) / (2 ** (bits - 1) - 1)
    error = (groups / step).round() * step - groups
    expected = (step**2 / 12).mean().sqrt()
    size = groups.square().mean().sqrt()
    return float(error.square().mean().sqrt() / size), float(expected / size)


def number_bits(weight: float, formats: Mapping[str, Stored]) -> Picture:
    """Draw how formats store the same weight, with what each bit is for and what comes back."""
    canvas = Canvas(f"The weight {weight:.6f}, bit by bit", legend="a weight comes back as scale × (number − zero)")
    canvas.says.append(f"The weight {weight:.6f}.")
    left, top = MARGIN + 84.0, 62.0
    for name, stored in formats.items():
        fields = _FIELDS[stored.number.dtype]
        canvas.text(MARGIN, top + 17, name, "text strong", "start")
        for place, (bit, field) in enumerate(zip(stored.bits, fields, strict=True)):
            canvas.cell(left + place * _BIT, top, _BIT - 1, 24, (bit, "small"), color=_COLORS[field])
        error = abs(stored.meaning - weight) / abs(weight)
        canvas.text(left + 16 * _BIT + 12, top + 9, f"{stored.formula}", "text small", "start")
        canvas.text(left + 16 * _BIT + 12, top + 24, f"error {error:.2%}", "muted small", "start")
        canvas.says.append(f"{name}: {stored.bits}, {stored.formula}, an error of {error:.2%}.")
        top += 40
    for number, (field, color) in enumerate(_COLORS.items()):
        canvas.box(MARGIN + number * 130, top + 2, 16, 14, fill=request_colors(color)[0])
        canvas.text(MARGIN + 22 + number * 130, top + 14, field, "text small", "start")
    return canvas.picture(top + 30)


def number_line(values: torch.Tensor, grids: Mapping[str, Sequence[float]], title: str) -> Picture:
    """Draw a histogram of ``values``, and on the same axis what each format represents: its numbers times its scale."""
    least, most = (float(f([float(g) for grid in grids.values() for g in grid])) for f in (min, max))
    left, right, base, bins = MARGIN + 84.0, WIDTH - MARGIN - 8.0, 150.0, 90
    canvas = Canvas(title, legend="above: how often; below: a stroke for each number that can be stored")
    counts = torch.histc(values.float(), bins, least, most)
    width, highest = (right - left) / bins, float(counts.max()) or 1.0
    bars = "".join(
        f"M{left + place * width:.1f} {base}v{-90 * float(count) / highest:.1f}h{width - 0.5:.1f}V{base}z"
        for place, count in enumerate(counts)
    )
    canvas.path(bars, fill=request_colors(0)[0])
    canvas.says.append(f"{title}: {len(values)} values.")
    for line, (name, grid) in enumerate(grids.items()):
        y = base + 18 + line * 34
        places = (left + (value - least) / (most - least) * (right - left) for value in grid)
        canvas.text(MARGIN, y + 15, name, "text", "start")
        canvas.path("".join(f"M{place:.1f} {y}v20" for place in places), "line")
        canvas.says.append(f"{name}: {len(set(grid))} numbers from {digits(min(grid))} to {digits(max(grid))}.")
    bottom = base + 18 + len(grids) * 34
    for value in (least, 0.0, most):
        at = left + (value - least) / (most - least) * (right - left)
        canvas.text(at, bottom + 10, digits(value), "muted small", "end" if value == most else "middle")
    return canvas.picture(bottom + 22)


def nibbles(words: Mapping[str, tuple[int, Sequence[int]]]) -> Picture:
    """Draw the eight numbers of 4 bits in words of 32 bits, the highest bits at the left.

    ``words`` are by name; to each belongs which column's number its bits hold, four by four, from the lowest.
    """
    canvas = Canvas("Eight numbers of four bits in a word", legend="the highest bits at the left")
    top = 58.0
    for name, (word, columns) in words.items():
        canvas.text(MARGIN, top + 14, name, "text", "start")
        canvas.text(WIDTH - MARGIN, top + 14, f"0x{word & 0xFFFFFFFF:08x}", "text mono", "end")
        for place, column in enumerate(columns):
            number = word >> 4 * place & 15
            x = MARGIN + (7 - place) * (_NIBBLE + 9)
            lines = (f"{number:04b} = {number}", "text small"), (f"column {column}", "text small")
            canvas.cell(x, top + 22, _NIBBLE, 38, *lines, color=column)
        held = ", ".join(f"column {column} is {word >> 4 * place & 15}" for place, column in enumerate(columns))
        canvas.says.append(f"{name}, from the lowest bits: {held}.")
        top += 76
    return canvas.picture(top)
