"""Which rows of a packed weight each tensor of a checkpoint fills."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.layers import MergedColumnParallelLinear
from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_MARGIN = 14
_TOP = 66
_HEIGHT = 210.0
"""Of all rows of a packed weight, in CSS pixels."""
_APART = 10.0
_SMALLEST = 24.0


def packed_rows(modules: Mapping[str, MergedColumnParallelLinear]) -> Picture:
    """Checkpoint tensors on the left, and on the right the one parameter whose rows they become.

    Args:
        modules: one to three live layers by name; they may be on the meta device.
    """
    canvas, says = Canvas(), []
    column = (WIDTH - 2 * _MARGIN) / len(modules)
    lowest = 0.0
    for number, (name, module) in enumerate(modules.items()):
        left = _MARGIN + number * column
        rows, width = module.weight.shape
        canvas.text(left, 26, f"{name}.weight", "text strong", "start")
        canvas.text(left, 46, f"{rows:,} × {width:,}, filled by", "muted small", "start")
        bottom, filled = _draw(canvas, module, left, column - 24)
        lowest = max(lowest, bottom)
        says.append(f"{name}.weight, {rows} × {width}: {filled}.")
    return canvas.picture(lowest + 14, "\n".join(says))


def _draw(canvas: Canvas, module: MergedColumnParallelLinear, left: float, width: float) -> tuple[float, str]:
    """One column; returns where it ends, and what it says."""
    parts = [part for part in module.weight_parts() if part.parameter == "weight"]
    rows, _ = module.weight.shape
    box, gap = 0.38 * width, 0.16 * width
    right = left + box + gap
    source_y = float(_TOP)
    target_y = _TOP + (len(parts) - 1) * _APART / 2
    filled = []
    for number, part in enumerate(parts):
        region = part.index[0]
        assert isinstance(region, slice)
        start, stop, _ = region.indices(rows)
        height = max(_SMALLEST, _HEIGHT * (stop - start) / rows)
        fill, ink = request_colors(number)
        canvas.path(
            f"M{left + box:g} {source_y:g}L{right:g} {target_y:g}M{left + box:g} {source_y + height:g}"
            f"L{right:g} {target_y + height:g}",
            "rule",
        )
        canvas.box(left, source_y, box, height, fill=fill)
        canvas.box(right, target_y, width - box - gap, height, fill=fill)
        name = part.source.removesuffix(".weight")
        canvas.text(left + box / 2, source_y + height / 2 + 5, name, "text small strong", fill=ink)
        label = f"rows {start:,}–{stop - 1:,}"
        canvas.text(right + (width - box - gap) / 2, target_y + height / 2 + 5, label, "text small", fill=ink)
        filled.append(f"{name} fills rows {start} to {stop - 1}")
        source_y += height + _APART
        target_y += height
    return source_y - _APART, "; ".join(filled)
