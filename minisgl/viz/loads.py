"""How evenly work is shared out: a line for each processor, a piece of it for each row that it works on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_MARGIN = 14
_LABEL = 96
_ROOM = WIDTH - 2 * _MARGIN - _LABEL
_LINE = 20
_BOX = 17
_NUMBER = 16.0

Load = Mapping[int, int]
"""Row → units of its work, in the order in which they are done."""


def loads(schedules: Mapping[str, Sequence[Load]], title: str, unit: str) -> Picture:
    """Some ways to share out the same work, below each other and on one scale.

    Args:
        schedules: name → what each processor does, one after the other.
        title: what is drawn.
        unit: of the work, in the singular; each takes equally long.
    """
    longest = max(sum(load.values()) for each in schedules.values() for load in each)
    canvas, says = Canvas(), [f"{title}."]
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(_MARGIN, 46, f"the number is the row's; width is time, in {unit}s", "muted small", "start")
    y = 58.0
    for name, processors in schedules.items():
        done = max(sum(load.values()) for load in processors)
        heading = f"{name}: done after {counted(done, unit)}"
        canvas.text(_MARGIN, y + 16, heading, "text", "start")
        says.append(f"{heading}.")
        y += 24
        for number, load in enumerate(processors):
            canvas.text(_MARGIN, y + 13, f"processor {number}", "muted small", "start")
            _draw(canvas, y, load, _ROOM / longest)
            words = ", ".join(f"{counted(count, unit)} of row {row}" for row, count in load.items())
            says.append(f"Processor {number}: {words or 'nothing'}.")
            y += _LINE
        x = _MARGIN + _LABEL + done * _ROOM / longest
        canvas.path(f"M{x - 0.75:g} {y - len(processors) * _LINE - 4:g}V{y:g}", "line dashed")
        y += 10
    return canvas.picture(y, "\n".join(says))


def _draw(canvas: Canvas, y: float, load: Load, unit_width: float) -> None:
    """The pieces of one processor."""
    x = float(_MARGIN + _LABEL)
    for row, count in load.items():
        fill, ink = request_colors(row)
        width = count * unit_width
        canvas.box(x, y, width - 1, _BOX, fill=fill)
        if width >= _NUMBER:
            canvas.text(x + width / 2, y + 13, row, "small", fill=ink)
        x += width
