"""Texts in boxes, a row under each other: what is on a wire, what is held back, and what could have been said."""

from __future__ import annotations

from collections.abc import Sequence

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, shorten, visible

_LEFT, _TOP, _ROW, _BOX = 126.0, 62.0, 34, 26
_SIGN, _PAD = 8.4, 10.0
_LONGEST_HEADING = 15

Part = tuple[str, int | None]


def strips(title: str, legend: str, rows: Sequence[tuple[str, Sequence[Part]]]) -> Picture:
    r"""Draw rows of texts, each with its heading; line ends are written as ``\r`` and ``\n``.

    Args:
        title: the first line.
        legend: what the colours mean.
        rows: of each, the heading and the texts with their colours, numbered as requests are, or None for grey. What
            doesn't fit in a row is left out, with ``…`` in its place.
    """
    canvas, y = Canvas(title, legend=legend, says=title), _TOP
    for heading, parts in rows:
        canvas.text(MARGIN, y + 19, shorten(heading, _LONGEST_HEADING), "text small", "start")
        x = _LEFT
        for text, color in parts:
            sign = visible(text.replace("\r", "\\r").replace("\n", "\\n"))
            width = _SIGN * len(sign) + _PAD
            if x + width > WIDTH - MARGIN:
                canvas.text(x + 2, y + 18, "…", "text mono", "start")
                break
            canvas.cell(x, y, width - 2, _BOX, (sign, "text mono"), color=color, kind="shared")
            x += width
        canvas.says.append(f"{heading}: {' | '.join(text for text, _ in parts)!r}")
        y += _ROW
    return canvas.picture(y + 4)
