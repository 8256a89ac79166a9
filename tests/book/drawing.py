"""Reads a picture back: what is written in it, and whether everything is on its card."""

from __future__ import annotations

from itertools import pairwise
from xml.etree import ElementTree

from minisgl.book import Picture
from minisgl.book.svg import WIDTH

SVG = "{http://www.w3.org/2000/svg}"
# Widths of a sign in CSS pixels. Fonts differ; these are a little under what DejaVu Sans needs for ordinary text.
_SIGN = {"viz-mono": 7.8, "viz-small": 6.2}
_OTHER_SIGN = 7.0
_BOLD = 1.1  # times the width of an ordinary sign


def texts(picture: Picture) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture.svg).iter(f"{SVG}text")]


def boxes(picture: Picture) -> list[ElementTree.Element]:
    """All rectangles but the card."""
    return list(ElementTree.fromstring(picture.svg).iter(f"{SVG}rect"))[1:]


def assert_sound(picture: Picture) -> None:
    """The drawing is one line of well-formed SVG, its label says its words, and nothing sticks out of its card."""
    assert "\n" not in picture.svg, "a blank line would end the drawing inside Markdown"
    root = ElementTree.fromstring(picture.svg)
    assert root.get("aria-label") == picture.text.replace("\n", " ")
    height = float(root.get("height", ""))
    assert picture.height == height
    for box in boxes(picture):
        x, y, wide, high = (float(box.get(name, "")) for name in ("x", "y", "width", "height"))
        assert x >= 0, box.attrib
        assert x + wide <= WIDTH, box.attrib
        assert y >= 0, box.attrib
        assert y + high <= height, box.attrib
    spans: list[tuple[float, float, float, str | None]] = []
    for text in root.iter(f"{SVG}text"):
        classes = (text.get("class") or "").split()
        sign = next((size for name, size in _SIGN.items() if name in classes), _OTHER_SIGN)
        length = sign * len(text.text or "") * (_BOLD if "viz-strong" in classes else 1.0)
        left = (
            float(text.get("x", "")) - {"start": 0.0, "middle": 0.5, "end": 1.0}[text.get("text-anchor", "")] * length
        )
        assert left >= 0, text.text
        assert left + length <= WIDTH, text.text
        y = float(text.get("y", ""))
        assert 12 <= y <= height, text.text
        spans.append((y, left, left + length, text.text))
    for (y, _, end, one), (below, start, _, other) in pairwise(sorted(spans)):
        assert below > y or end <= start, f"{one!r} runs into {other!r}"
