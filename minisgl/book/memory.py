"""Memory: the pages of the KV cache, the pool from step to step, and the budget of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, byte_size, counted, request_colors, round_step
from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import free_memory, total_memory
from minisgl.llm import LLM
from minisgl.request import Request
from minisgl.scheduler.memory import KVMemory

_COLUMNS = 16
_CELL = (WIDTH - 2 * MARGIN) / _COLUMNS
_LINE = 44


def page_map(memory: KVMemory) -> Picture:
    """Draw every page of the pool, and the page-table row of every running request.

    A private page has the colour and the name of its request (``r3`` has ``uid`` 3); a cached page is grey and says
    how many running requests read it. In the page table, a page says how many of its positions are taken.
    """
    return _PageMap(memory).draw()


class _PageMap:
    """One drawing: ``y`` is how far it has come."""

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory
        self.running: list[tuple[int, Request]] = [
            (slot, memory.table.request(slot)) for slot in memory.table.slots.tolist()
        ]
        self.readers = np.zeros(memory.num_pages, dtype=np.int64)
        self.owner: dict[int, Request] = {}
        for slot, request in self.running:
            row = memory.row(slot)
            self.readers[row] += 1
            self.owner.update(dict.fromkeys(row[~memory.is_cached[row]].tolist(), request))
        self.whole = f"{memory.num_pages} pages of {memory.page_size} tokens"
        cached = int(memory.is_cached.sum())
        self.counts = f"{memory.pool.num_free} free, {len(self.owner)} private, {cached} cached"
        self.canvas, self.y = Canvas(f"Page pool: {self.whole}", self.counts), 38.0

    def draw(self) -> Picture:
        memory, size = self.memory, self.memory.page_size
        self._pages(range(memory.num_pages), [self._state(page) for page in range(memory.num_pages)])
        readers = "grey: cached (3× = read by 3 running requests, idle = by none)"
        legend = f"{readers}  ·  colour: private to one  ·  outline: free"
        self.canvas.text(MARGIN, self.y + 14, legend, "muted small", "start")
        self.y += 24
        says = [f"{self.whole}: {self.counts}."]
        for slot, request in self.running:
            row, kv_len = memory.row(slot).tolist(), int(memory.table.kv_len[slot])
            length = f"{counted(kv_len, 'position')} in {counted(len(row), 'page')}"
            title = f"Page table, request r{request.uid}: {length}"
            self.canvas.text(MARGIN, self.y + 26, title, "text strong", "start")
            self.y += 38
            taken = [min(max(kv_len - index * size, 0), size) for index in range(len(row))]
            self._pages(row, [f"{count}/{size}" for count in taken])
            says.append(f"Request r{request.uid} reads pages {row}.")
        return self.canvas.picture(self.y + 8, "\n".join(says))

    def _state(self, page: int) -> str:
        if self.memory.pool.is_free[page]:
            return "free"
        if page in self.owner:
            return f"r{self.owner[page].uid}"
        return f"{self.readers[page]}×" if self.readers[page] else "idle"

    def _pages(self, pages: Sequence[int], labels: list[str]) -> None:
        for index, (page, label) in enumerate(zip(pages, labels, strict=True)):
            x, y = MARGIN + index % _COLUMNS * _CELL, self.y + index // _COLUMNS * _LINE
            kind, fill, ink = "shared", "", ""
            if page in self.owner:
                fill, ink = request_colors(self.owner[page].uid)
            elif self.memory.pool.is_free[page]:
                kind = "empty"
            text = "muted" if kind == "empty" else "text"
            self.canvas.box(x + 2, y, _CELL - 4, _LINE - 4, kind, fill)
            self.canvas.text(x + _CELL / 2, y + 18, page, text if kind == "empty" else "text strong", fill=ink)
            self.canvas.text(x + _CELL / 2, y + 34, label, f"{text} small", fill=ink)
        self.y += -(-len(pages) // _COLUMNS) * _LINE


# -- the pool from step to step --------------------------------------------------------------------------------------

_LEFT, _RIGHT = 64.0, WIDTH - 14.0
_TOP, _BOTTOM = 92.0, 232.0
_ROWS_TOP, _ROWS_BOTTOM = 252.0, 292.0


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Pages by what they are for, at one moment."""

    read: int  # in the rows of running requests
    idle: int  # cached and in no row
    promised: int  # that the running requests may still take if all of them generate as much as they may
    running: int  # number of running requests
    preempted: int = 0  # how many lost their pages since the moment before

    @classmethod
    def of(cls, memory: KVMemory, preempted: int = 0) -> PoolUse:
        """As it is now."""
        slots = memory.table.slots
        final = -(-(memory.table.max_len[slots] - 1) // memory.page_size)
        promised = int(np.maximum(final - memory.table.num_pages[slots], 0).sum())
        return cls(memory.num_pages - memory.available, memory.cache.num_evictable, promised, len(slots), preempted)


def pool_use(moments: Sequence[PoolUse], num_pages: int, title: str, span: int = 0) -> Picture:
    """Draw how much of the pool is read, idle, free and promised from step to step, and how many requests run.

    Args:
        moments: one a step.
        num_pages: of the pool.
        span: steps that the picture has room for, if more than there are: to compare pictures.
    """
    span = max(span, len(moments))
    width = min((_RIGHT - _LEFT) / span, 24.0)
    mean = sum(moment.read for moment in moments) / len(moments)
    preempted = counted(sum(moment.preempted for moment in moments), "preemption")
    title = f"{title}: {counted(len(moments), 'step')}, {mean / num_pages:.0%} of the pool read on average, {preempted}"
    legend = "blue: read by running requests  ·  grey: cached, idle  ·  dashed: promised to them, too  ·  ×: preempted"
    canvas = Canvas(title, legend=legend)
    most = max(moment.running for moment in moments)

    def heights(pages: Sequence[int]) -> list[float]:
        return [_BOTTOM - (_BOTTOM - _TOP) * min(count, num_pages) / num_pages for count in pages]

    rows = [_ROWS_BOTTOM - (_ROWS_BOTTOM - _ROWS_TOP) * moment.running / max(most, 1) for moment in moments]
    end = _LEFT + len(moments) * width
    canvas.path(f"M{_LEFT:g} {_TOP:g}H{end:g}V{_BOTTOM:g}H{_LEFT:g}Z", "empty")
    canvas.path(_area(heights([moment.read + moment.idle for moment in moments]), width, _BOTTOM), "shade")
    blue, _ = request_colors(0)
    canvas.path(_area(heights([moment.read for moment in moments]), width, _BOTTOM), fill=blue)
    promised = heights([moment.read + moment.promised for moment in moments])
    canvas.path(_outline(promised, width), "line dashed")
    for step, moment in enumerate(moments):
        if moment.preempted:
            canvas.text(_LEFT + (step + 0.5) * width, _TOP - 6, "×", "text strong")
    canvas.path(_area(rows, width, _ROWS_BOTTOM), "shade")
    for y, label in (
        (_TOP + 5, num_pages),
        ((_TOP + _BOTTOM) / 2 + 4, "pages"),
        (_BOTTOM + 4, 0),
        (_ROWS_TOP + 8, most),
        ((_ROWS_TOP + _ROWS_BOTTOM) / 2 + 6, "running"),
        (_ROWS_BOTTOM + 18, "step"),
    ):
        canvas.text(_LEFT - 8, y, label, "muted small", "end")
    for step in range(0, span, max(1, int(round_step(span / 16)))):
        canvas.text(_LEFT + (step + 0.5) * width, _ROWS_BOTTOM + 18, step, "muted small")
    says = [
        f"{title}, at most {counted(most, 'request')} running.",
        "Pages read: " + " ".join(str(moment.read) for moment in moments) + ".",
    ]
    return canvas.picture(_ROWS_BOTTOM + 28, "\n".join(says))


def _outline(heights: Sequence[float], width: float) -> str:
    """Steps of equal width at these heights."""
    points = [f"V{y:.1f}H{_LEFT + (step + 1) * width:.1f}" for step, y in enumerate(heights)]
    return f"M{_LEFT:g} {heights[0]:.1f}{''.join(points)}"


def _area(heights: Sequence[float], width: float, bottom: float) -> str:
    return f"{_outline(heights, width)}V{bottom:g}H{_LEFT:g}Z"


# -- the budget of a device ------------------------------------------------------------------------------------------

_BAR_TOP, _BAR = 64, 40
_NUMBER_WIDTH = 20


def memory_budget(parts: Mapping[str, int], total: int, title: str = "Device memory") -> Picture:
    """Draw one bar of ``total`` bytes cut into numbered parts, which are listed below; the rest is free.

    Args:
        parts: bytes by name, in the order in which they are drawn.
        total: bytes of the whole.
        title: what the whole is.

    Raises `ConfigError` if a part is negative, or the parts are more than the whole.
    """
    used = sum(parts.values())
    if min(parts.values(), default=0) < 0 or used > total or total <= 0:
        sizes = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise ConfigError(f"memory_budget: {sizes} must be at least 0 and fit into {total} bytes together")
    canvas = Canvas(title, byte_size(total))
    scale = (WIDTH - 2 * MARGIN) / total
    says, start, next_number = [f"{title}: {byte_size(total)}."], 0, float(MARGIN + _NUMBER_WIDTH / 2)
    for number, (name, size) in enumerate([*parts.items(), ("free", total - used)], start=1):
        kind, (fill, ink) = ("empty", ("", "")) if number > len(parts) else ("shared", request_colors(number - 1))
        x, width = MARGIN + start * scale, size * scale
        start += size
        if size:
            canvas.box(x, _BAR_TOP, max(width, 1.5), _BAR, kind, fill)
        y = _BAR_TOP + _BAR + 14 + (number - 1) * 26
        canvas.box(MARGIN, y, 28, 20, kind, fill)
        canvas.text(MARGIN + 14, y + 15, number, "text strong small", fill=ink)
        canvas.text(MARGIN + 40, y + 15, name, "text", "start")
        canvas.text(WIDTH - 130, y + 15, byte_size(size), "text", "end")
        canvas.text(WIDTH - MARGIN, y + 15, f"{100 * size / total:.1f} %", "muted", "end")
        if size:
            next_number = _draw_number(canvas, x, width, number, ink, next_number)
        says.append(f"{number}. {name}: {byte_size(size)}, {100 * size / total:.1f} %.")
    return canvas.picture(_BAR_TOP + _BAR + 20 + (len(parts) + 1) * 26, "\n".join(says))


def _draw_number(canvas: Canvas, x: float, width: float, number: int, ink: str, earliest: float) -> float:
    """Number of a part: in it, or above it and away from the number before; returns where the next may stand."""
    middle = x + width / 2
    if width >= _NUMBER_WIDTH:
        canvas.text(middle, _BAR_TOP + 25, number, "text strong", fill=ink)
        return earliest
    place = min(max(middle, earliest), WIDTH - MARGIN - _NUMBER_WIDTH / 2)
    canvas.path(f"M{place:g} {_BAR_TOP - 10}L{middle:g} {_BAR_TOP}", "rule")
    canvas.text(place, _BAR_TOP - 13, number, "text small strong")
    return place + _NUMBER_WIDTH


def engine_memory(llm: LLM) -> Picture:
    """Draw the memory budget of a live engine; on a CPU, that of the machine or the container."""
    engine, device, cache = llm.engine, llm.engine.device, llm.engine.kv_cache
    pages = f"{counted(engine.num_pages, 'page')} of {counted(cache.page_size, 'token')}"
    parts = {
        "weights": engine.model_bytes,
        f"KV cache: {pages}, and the dummy page": cache.k.nbytes + cache.v.nbytes,
    }
    if engine.graph_bytes:
        parts["CUDA graphs and their buffers"] = engine.graph_bytes
    total = total_memory(device)
    # Memory that has not been written to yet may still count as free, so the parts can be more than what is in use.
    parts["all else in use: activations, tables, other programs"] = max(
        0, total - free_memory(device) - sum(parts.values())
    )
    return memory_budget(parts, total, f"Memory of {device.type.replace('cuda', 'the GPU').replace('cpu', 'the CPU')}")
