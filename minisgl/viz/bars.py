"""What something is made of: a bar a thing, a piece of it for each part."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_MARGIN = 14
_LABEL = 190
_TOTAL = 80
_ROOM = WIDTH - 2 * _MARGIN - _LABEL - _TOTAL
_LINE = 34
_BOX = 24
_TOP = 44
_NUMBER = 16.0


def bars(things: Mapping[str, Mapping[str, float]], title: str, unit: str) -> Picture:
    """One bar a thing, as long as its parts together. The number in a piece says which part it is.

    Args:
        things: name → part → size, none negative. A part has one number in all bars.
        title: what is drawn.
        unit: of the sizes, which are written with three digits.
    """
    parts = list(dict.fromkeys(part for sizes in things.values() for part in sizes))
    longest = max(sum(sizes.values()) for sizes in things.values()) or 1.0
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    says = [f"{title}, {unit}."]
    for line, (name, sizes) in enumerate(things.items()):
        y, x = _TOP + line * _LINE, float(_MARGIN + _LABEL)
        canvas.text(_MARGIN, y + 17, name, "text", "start")
        for part, size in sizes.items():
            width = size / longest * _ROOM
            fill, ink = request_colors(parts.index(part))
            if width >= 1:
                canvas.box(x, y, max(width - 1, 0.5), _BOX, fill=fill)
            if width >= _NUMBER:
                canvas.text(x + width / 2, y + 17, parts.index(part) + 1, "small", fill=ink)
            x += width
        canvas.text(x + 6, y + 17, f"{_digits(sum(sizes.values()))} {unit}", "text small strong", "start")
        words = ", ".join(f"{part} {_digits(size)}" for part, size in sizes.items())
        says.append(f"{name}: {_digits(sum(sizes.values()))}, of which {words}.")
    bottom = _TOP + len(things) * _LINE + 8
    for number, part in enumerate(parts):
        x, y = _MARGIN + (number % 2) * 370, bottom + number // 2 * 26
        fill, ink = request_colors(number)
        canvas.box(x, y, 22, 19, fill=fill)
        canvas.text(x + 11, y + 14, number + 1, "text small strong", fill=ink)
        canvas.text(x + 32, y + 14, part, "text small", "start")
    return canvas.picture(bottom + (len(parts) + 1) // 2 * 26 + 6, "\n".join(says))


def _digits(size: float) -> str:
    return f"{size:,.0f}" if size >= 1000 else f"{float(f'{size:.3g}'):g}"
