"""What the pages of the pool are for, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.scheduler import KVMemory
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_LEFT, _RIGHT = 64.0, WIDTH - 14.0
_TOP, _BOTTOM = 92.0, 232.0
_ROWS_TOP, _ROWS_BOTTOM = 252.0, 292.0
_WIDEST = 24.0
_LEGEND = "blue: read by running requests  ·  grey: cached, idle  ·  dashed: promised to them, too  ·  ×: preempted"


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages by what they are for, at one moment.

    Args:
        read: in the rows of running requests.
        idle: cached and in no row.
        promised: that the running requests will still take if they all generate all they may.
        running: number of running requests.
        preempted: how many lost their pages since the moment before.
    """

    read: int
    idle: int
    promised: int
    running: int
    preempted: int = 0

    @classmethod
    def of(cls, memory: KVMemory, preempted: int = 0) -> PoolUse:
        """As it is now."""
        slots = memory.table.slots
        final = -(-(memory.table.max_len[slots] - 1) // memory.page_size)
        promised = int(np.maximum(final - memory.table.num_pages[slots], 0).sum())
        return cls(memory.num_pages - memory.available, memory.cache.num_evictable, promised, len(slots), preempted)


def pool_use(moments: Sequence[PoolUse], num_pages: int, title: str, span: int = 0) -> Picture:
    """The pool from step to step: how much of it is read, idle, free and promised, and how many requests run.

    Args:
        moments: one a step.
        num_pages: of the pool.
        title: what is drawn.
        span: steps that the picture has room for, if more than there are: to compare pictures.
    """
    span = max(span, len(moments))
    width = min((_RIGHT - _LEFT) / span, _WIDEST)
    canvas = Canvas()
    mean = sum(moment.read for moment in moments) / len(moments)
    preempted = sum(moment.preempted for moment in moments)
    numbers = (
        f"{counted(len(moments), 'step')}, {mean / num_pages:.0%} of the pool read on average, "
        f"{counted(preempted, 'preemption')}"
    )
    canvas.text(14, 26, f"{title}: {numbers}", "text strong", "start")
    canvas.text(14, 48, _LEGEND, "muted small", "start")

    def height(pages: float) -> float:
        return _BOTTOM - (_BOTTOM - _TOP) * min(pages, num_pages) / num_pages

    most = max(moment.running for moment in moments)

    def rows_height(rows: float) -> float:
        return _ROWS_BOTTOM - (_ROWS_BOTTOM - _ROWS_TOP) * rows / max(most, 1)

    blue, _ = request_colors(0)
    read, full, rows = ([] for _ in range(3))
    for moment in moments:
        read.append(height(moment.read))
        full.append(height(moment.read + moment.idle))
        rows.append(rows_height(moment.running))
    end = _LEFT + len(moments) * width
    canvas.path(f"M{_LEFT:g} {_TOP:g}H{end:g}V{_BOTTOM:g}H{_LEFT:g}Z", "empty")
    canvas.path(_area(full, width, _BOTTOM), "shade")
    canvas.path(_area(read, width, _BOTTOM), fill=blue)
    canvas.path(_outline([height(moment.read + moment.promised) for moment in moments], width), "line dashed")
    for step, moment in enumerate(moments):
        if moment.preempted:
            canvas.text(_LEFT + (step + 0.5) * width, _TOP - 6, "×", "text strong")
    canvas.text(_LEFT - 8, _TOP + 5, f"{num_pages}", "muted small", "end")
    canvas.text(_LEFT - 8, (_TOP + _BOTTOM) / 2 + 4, "pages", "muted small", "end")
    canvas.text(_LEFT - 8, _BOTTOM + 4, "0", "muted small", "end")
    canvas.path(_area(rows, width, _ROWS_BOTTOM), "shade")
    canvas.text(_LEFT - 8, _ROWS_TOP + 8, f"{most}", "muted small", "end")
    canvas.text(_LEFT - 8, (_ROWS_TOP + _ROWS_BOTTOM) / 2 + 6, "running", "muted small", "end")
    _ticks(canvas, span, lambda step: _LEFT + (step + 0.5) * width)
    says = [
        f"{title}: {numbers}, at most {counted(most, 'request')} running.",
        "Pages read: " + " ".join(str(moment.read) for moment in moments) + ".",
    ]
    return canvas.picture(_ROWS_BOTTOM + 28, "\n".join(says))


def _outline(heights: Sequence[float], width: float) -> str:
    """Steps of equal width at these heights."""
    points = [f"V{y:.1f}H{_LEFT + (step + 1) * width:.1f}" for step, y in enumerate(heights)]
    return f"M{_LEFT:g} {heights[0]:.1f}{''.join(points)}"


def _area(heights: Sequence[float], width: float, bottom: float) -> str:
    return f"{_outline(heights, width)}V{bottom:g}H{_LEFT:g}Z"


def _ticks(canvas: Canvas, span: int, place: Callable[[int], float]) -> None:
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500, 10**9) if span / step <= 16)
    for step in range(0, span, every):
        canvas.text(place(step), _ROWS_BOTTOM + 18, step, "muted small")
    canvas.text(_LEFT - 8, _ROWS_BOTTOM + 18, "step", "muted small", "end")
