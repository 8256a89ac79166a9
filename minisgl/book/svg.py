"""Small drawings in SVG that read well on light and dark pages, and without seeing colours.

Each drawing has a card as its background, so it is legible in JupyterLab, on GitHub and in the book, whose style sheet
changes the card through the custom properties ``--viz-*``. Everything that a colour says is also written.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from itertools import groupby
from pathlib import Path

Point = tuple[float, float]
Line = tuple[object, str]  # words, and the kind of text that they are

WIDTH = 760  # width of every drawing in CSS pixels: the text column of a notebook or of the book
MARGIN = 14
JOINER = "\u200d"  # the zero-width joiner, which makes one emoji of two

_STYLE = Path(__file__).with_name("pictures.css").read_text(encoding="utf-8").replace("\n", "")

# What no XML document may have: most control characters, and lone surrogates.
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_LINE = 17

# Okabe and Ito's palette, which stays distinct under the common kinds of colour blindness, and a legible text on each.
_PALETTE = (
    ("#0072b2", "#ffffff"),
    ("#e69f00", "#000000"),
    ("#009e73", "#000000"),
    ("#cc79a7", "#000000"),
    ("#56b4e9", "#000000"),
    ("#d55e00", "#000000"),
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing, and the same in words for screen readers and wherever only text is shown."""

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def height(self) -> float:
        """In CSS pixels."""
        found = re.search(' height="([^"]+)"', self.svg)
        return float(found[1]) if found else 0.0

    def _repr_svg_(self) -> str:
        return self.svg


def attribute(text: str) -> str:
    """Words in one line, as an attribute of SVG or HTML has them."""
    return escape(text, quote=True).replace("\n", " ")


def request_colors(number: int) -> tuple[str, str]:
    """Fill and text colour of a request, by its ``uid``; they repeat after six."""
    return _PALETTE[number % len(_PALETTE)]


def visible(text: str) -> str:
    """Text of a token with visible spaces and line ends."""
    signs = text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return "".join(sign if sign.isprintable() or sign == JOINER else "�" for sign in signs)


def shorten(text: str, longest: int) -> str:
    """The beginning of a text, at most ``longest`` characters."""
    return text if len(text) <= longest else text[: max(longest - 1, 0)] + "…"


def counted(count: int, noun: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def runs(numbers: Iterable[int]) -> str:
    """``3 5–8 2``: numbers in their order, each ascending run as its first and last."""
    words = []
    for _, run in groupby(enumerate(numbers), key=lambda item: item[1] - item[0]):
        first, *others = [number for _, number in run]
        words.append(f"{first}–{others[-1]}" if others else str(first))
    return " ".join(words)


def byte_size(count: int) -> str:
    """Bytes in binary units: ``1.50 GiB``."""
    size, units = float(count), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size /= 1024
        del units[0]
    return counted(count, "byte") if units[0] == "bytes" else f"{size:.2f} {units[0]}"


def duration(seconds: float) -> str:
    """``12 µs``, ``3.45 ms``, ``1.20 s``."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1e3:.2f} ms" if seconds < 1 else f"{seconds:.2f} s"


def digits(value: float) -> str:
    """Three significant digits, or all that stand before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{float(f'{value:.3g}'):g}"


def round_step(least: float) -> float:
    """The smallest of …, 0.1, 0.2, 0.5, 1, 2, 5, 10, … that is at least ``least``."""
    steps = (factor * 10.0**power for power in range(-9, 16) for factor in (1, 2, 5))
    return next(step for step in steps if step >= least)


def circle(x: float, y: float, radius: float) -> str:
    """A circle as a path for `Canvas.path`."""
    half = f"a{radius:g} {radius:g} 0 1 0"
    return f"M{x - radius:g} {y:g}{half} {2 * radius:g} 0{half} {-2 * radius:g} 0"


class Canvas:
    """Collect shapes and text, and make a `Picture` of them. All lengths are CSS pixels.

    Args:
        title, right: of the first line, at its left and at its right end.
        legend: of the line below.
        says: the first of the sentences that say the same in words; ``says`` collects the others.
    """

    def __init__(self, title: str = "", right: str = "", legend: str = "", says: str = "") -> None:
        self._parts: list[str] = []
        self.says = [says] if says else []
        if title:
            self.text(MARGIN, 26, title, "text strong", "start")
        if right:
            self.text(WIDTH - MARGIN, 26, right, anchor="end")
        if legend:
            self.note(46, legend)

    def box(self, x: float, y: float, width: float, height: float, kind: str = "empty", fill: str = "") -> None:
        """A rectangle: of a style-sheet ``kind`` (``empty``, ``shared``), or in the colour ``fill``."""
        look = f'fill="{fill}"' if fill else f'class="viz-{kind}"'
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" {look}/>')

    def text(
        self, x: float, y: float, text: object, kind: str = "text", anchor: str = "middle", fill: str = ""
    ) -> None:
        """One line of text with its baseline at ``y``; ``kind`` names style-sheet classes without their prefix."""
        classes = " ".join(f"viz-{name}" for name in kind.split())
        style = f' style="fill:{fill}"' if fill else ""
        words = escape(_NOT_XML.sub("\ufffd", str(text)))
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}"{style}>{words}</text>')

    def note(self, y: float, words: str) -> None:
        """A small line at the left edge: a legend, or a remark on what is above."""
        self.text(MARGIN, y, words, "muted small", "start")

    def lines(self, x: float, middle: float, *lines: Line, anchor: str = "middle", fill: str = "") -> None:
        """Lines of text below each other, with the middle of all at the height ``middle``."""
        for number, (words, kind) in enumerate(lines):
            self.text(x, middle + 5 + _LINE * (number - (len(lines) - 1) / 2), words, kind, anchor, fill)

    def cell(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: Line,
        color: int | None = None,
        kind: str = "empty",
        anchor: str = "middle",
    ) -> None:
        """A box with lines of text in its middle or at its left; ``color`` is that of a request, None is the kind's."""
        fill, ink = ("", "") if color is None else request_colors(color)
        self.box(x, y, width, height, kind, fill)
        self.lines(x + (10 if anchor == "start" else width / 2), y + height / 2, *lines, anchor=anchor, fill=ink)

    def path(self, d: str, kind: str = "line", fill: str = "", stroke: str = "") -> None:
        """Lines, in the colour ``stroke`` if there is one, or an area in the colour ``fill``; ``d`` as in SVG."""
        classes = " ".join(f"viz-{name}" for name in kind.split())
        look = f'fill="{fill}"' if fill else f'class="{classes}"'
        style = f' style="stroke:{stroke}"' if stroke else ""
        self._parts.append(f'<path d="{d}" {look}{style}/>')

    def arrow(self, start: Point, end: Point, kind: str = "text", fill: str = "", thickness: float = 1.5) -> None:
        """A straight arrow with its tip at ``end``, in the colour ``fill`` or in that of a ``kind`` of text."""
        length = math.dist(start, end) or 1.0
        along, across = (end[0] - start[0]) / length, (end[1] - start[1]) / length
        half, wing, neck = thickness / 2, thickness / 2 + 3, max(length - 8, 0.0)
        outline = ((0.0, half), (neck, half), (neck, wing), (length, 0.0), (neck, -wing), (neck, -half), (0.0, -half))
        corners = ((start[0] + a * along - b * across, start[1] + a * across + b * along) for a, b in outline)
        self.path(f"M{'L'.join(f'{x:.1f} {y:.1f}' for x, y in corners)}Z", kind, fill)

    def columns(self, left: float, y: float, width: float, count: int, room: float = 0.0) -> None:
        """The numbers of columns above or below them, each as far from the next as ``room`` at least."""
        for column in range(0, count, max(1, int(round_step(room / width)))):
            self.text(left + (column + 0.5) * width, y, column, "muted small")

    def badge(self, x: float, y: float, number: int) -> None:
        """The number of a thing, counted from 1, in a box of its colour."""
        self.cell(x, y, 22, 19, (number + 1, "text small strong"), color=number)

    def rest(self, y: float, count: int, noun: str) -> str:
        """A line that says how many were left out; returns it."""
        words = f"… and {counted(count, noun)} more"
        self.text(MARGIN, y, words, "muted", "start")
        return words

    def picture(self, height: float, text: str = "") -> Picture:
        """Everything drawn so far on a card of this height; ``text`` says the same in words, or ``says`` does."""
        text = _NOT_XML.sub("\ufffd", text or "\n".join(self.says))
        card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6" class="viz-card"/>'
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="viz" role="img" aria-label="{attribute(text)}" '
            f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" style="max-width:100%;height:auto">'
            f"<style>{_STYLE}</style>{card}{''.join(self._parts)}</svg>"
        )
        return Picture(svg, text)
