"""Small drawings in SVG that read well on light and dark pages, and without seeing colours.

A drawing brings its own card as background, so it is legible wherever it lands: in JupyterLab, on GitHub, in the
book. The book's style sheet may change the card through the custom properties ``--viz-*``. Colour is never the only
sign: what a colour says is also written.
"""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

Point = tuple[float, float]

WIDTH = 760
"""Width of every drawing in CSS pixels: the text column of a notebook or of the book."""

JOINER = "\u200d"
"""Makes one emoji of two, and is nothing to be seen by itself."""

_STYLE = """
.viz-card{fill:var(--viz-card,#fbfaf7);stroke:var(--viz-line,#b9b6ae)}
.viz-empty{fill:none;stroke:var(--viz-line,#b9b6ae)}
.viz-shared{fill:var(--viz-shared,#d9d7d0);stroke:var(--viz-ink,#24231f)}
.viz-shade{fill:var(--viz-shared,#d9d7d0)}
.viz-text{fill:var(--viz-ink,#24231f)}
.viz-muted{fill:var(--viz-muted,#66645d)}
.viz-line{fill:none;stroke:var(--viz-ink,#24231f);stroke-width:1.5}
.viz-rule{fill:none;stroke:var(--viz-line,#b9b6ae)}
.viz-dashed{stroke-dasharray:4 4}
.viz text{font-family:system-ui,"Segoe UI","DejaVu Sans",sans-serif;font-size:14px}
.viz .viz-small{font-size:12px}
.viz .viz-strong{font-weight:600}
.viz .viz-mono{font-family:ui-monospace,"DejaVu Sans Mono",Menlo,Consolas,monospace;font-size:13px}
""".replace("\n", "")

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_ROOT = re.compile(r'<svg [^>]* height="(?P<height>[^"]+)"[^>]*><style>[^<]*</style>(?P<inside>.*)</svg>')
_HEADING_LEFT, _HEADING_LINE, _HEADING_LENGTH = 14, 20, 80

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
    """A drawing for a notebook to show.

    Args:
        svg: the drawing.
        text: what it says, in words: for screen readers, and wherever only text is shown.
    """

    svg: str
    text: str

    def __repr__(self) -> str:
        return self.text

    @property
    def height(self) -> float:
        """In CSS pixels."""
        return float(self._root["height"])

    @property
    def inside(self) -> str:
        """All that is drawn, to be put into another drawing."""
        return self._root["inside"]

    @property
    def _root(self) -> re.Match[str]:
        root = _ROOT.fullmatch(self.svg)
        assert root is not None, "not made by a Canvas"
        return root

    def _repr_svg_(self) -> str:
        return self.svg


def request_colors(number: int) -> tuple[str, str]:
    """Fill and text colour of a request, by its ``uid``; they repeat after six."""
    return _PALETTE[number % len(_PALETTE)]


def visible(text: str) -> str:
    """Text in which one can see the spaces and the ends of lines, as a token needs it."""
    signs = text.replace("\n", "↵").replace("\t", "⇥").replace(" ", "·")
    return "".join(sign if sign.isprintable() or sign == JOINER else "�" for sign in signs)


def shorten(text: str, longest: int) -> str:
    """The beginning of a text, in at most ``longest`` signs."""
    return text if len(text) <= longest else text[: max(longest - 1, 0)] + "…"


def counted(count: int, noun: str) -> str:
    """``1 page``, ``2 pages``."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def runs(numbers: Iterable[int]) -> str:
    """``3 5–8 2``: numbers in their order, each ascending run as its first and last."""
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return " ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def circle(x: float, y: float, radius: float) -> str:
    """A circle as a path for `Canvas.path`."""
    half = f"a{radius:g} {radius:g} 0 1 0"
    return f"M{x - radius:g} {y:g}{half} {2 * radius:g} 0{half} {-2 * radius:g} 0"


def _valid(text: str) -> str:
    """``text`` with U+FFFD for what no XML document may have: most control characters, and lone surrogates."""
    return _NOT_XML.sub("\ufffd", text)


class Canvas:
    """Collects shapes and text, and makes a `Picture` of them. All lengths are CSS pixels."""

    def __init__(self) -> None:
        self._parts: list[str] = []

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
        words = escape(_valid(str(text)))
        self._parts.append(f'<text x="{x:g}" y="{y:g}" class="{classes}" text-anchor="{anchor}"{style}>{words}</text>')

    def path(self, d: str, kind: str = "line", fill: str = "", stroke: str = "") -> None:
        """Lines, in the colour ``stroke`` if there is one, or an area in the colour ``fill``.

        ``d`` as in SVG, such as ``M0 0H10V10``.
        """
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

    def group(self, y: float, parts: str) -> None:
        """Parts of another drawing, moved down by ``y``."""
        self._parts.append(f'<g transform="translate(0 {y:g})">{parts}</g>')

    def picture(self, height: float, text: str) -> Picture:
        """Everything drawn so far on a card of ``height``. ``text`` says the same in words."""
        text = _valid(text)
        label = escape(text, quote=True).replace("\n", " ")
        card = f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1:g}" rx="6" class="viz-card"/>'
        svg = (
            f'<svg xmlns="http://www.w3.org/2000/svg" class="viz" role="img" aria-label="{label}" '
            f'width="{WIDTH}" height="{height:g}" viewBox="0 0 {WIDTH} {height:g}" style="max-width:100%;height:auto">'
            f"<style>{_STYLE}</style>{card}{''.join(self._parts)}</svg>"
        )
        return Picture(svg, text)


def stack(pictures: Sequence[Picture], headings: Sequence[str]) -> Picture:
    """Drawings below each other as one, each under its heading and with its own card.

    Args:
        pictures: made by a `Canvas`.
        headings: one each.
    """
    canvas, y = Canvas(), 0.0
    for picture, heading in zip(pictures, headings, strict=True):
        for line in textwrap.wrap(heading, _HEADING_LENGTH):
            canvas.text(_HEADING_LEFT, y + 22, line, "text strong", "start")
            y += _HEADING_LINE
        canvas.group(y + 12, picture.inside)
        y += 12 + picture.height
    says = [f"{heading}: {picture.text}" for heading, picture in zip(headings, pictures, strict=True)]
    return canvas.picture(y, "\n".join(says))
