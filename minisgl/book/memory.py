"""Memory: the pages of the KV cache, the pool from step to step, and the budget of a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, byte_size, counted, request_colors, round_step
from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import free_memory, total_memory
from minisgl.llm import LLM
from minisgl.scheduler.memory import KVMemory

if TYPE_CHECKING:
    from minisgl.book.toy import PagedCache, PagePool

_COLUMNS = 16
_CELL = (WIDTH - 2 * MARGIN) / _COLUMNS
_LINE = 44


def page_map(memory: KVMemory) -> Picture:
    """Draw every page of the pool, and the page-table row of every running request.

    A private page has the colour and the name of its request (``r3`` has ``uid`` 3); a cached page is grey and says
    how many running requests read it. In the page table, a page says how many of its positions are taken.
    """
    running = [(slot, memory.table.request(slot).uid) for slot in memory.table.slots.tolist()]
    rows = {uid: (memory.row(slot).tolist(), int(memory.table.kv_len[slot])) for slot, uid in running}
    cached, free = (set(np.flatnonzero(which).tolist()) for which in (memory.is_cached, memory.pool.is_free))
    return _draw_pages(memory.num_pages, memory.page_size, free, cached, rows, "Page table, request")


def toy_page_map(pool: PagePool, caches: Mapping[int, PagedCache], page_lists: bool = True) -> Picture:
    """Draw the toy engine's pages as `page_map` does. A page with several readers, or with none in a row, is cached.

    Args:
        caches: of the rows that run, by their numbers, which give them their names and colours.
        page_lists: draw the rows' lists of pages below the pool.
    """
    rows = {number: (cache.pages, cache.length) for number, cache in caches.items()}
    private = {page for pages, _ in rows.values() for page in pages if pool.readers[page] == 1}
    cached = {page for page, readers in enumerate(pool.readers) if readers} - private
    lists = "Pages of" if page_lists else ""
    return _draw_pages(len(pool.readers), pool.page_size, set(pool.free), cached, rows, lists)


def _draw_pages(
    num_pages: int, size: int, free: set[int], cached: set[int], rows: Mapping[int, tuple[list[int], int]], lists: str
) -> Picture:
    """``rows``: pages and number of tokens by the request's number. ``lists``: heading of each one's pages, or ""."""
    readers: dict[int, list[int]] = {page: [] for page in range(num_pages)}
    for uid, (pages, _) in rows.items():
        for page in pages:
            readers[page].append(uid)
    owners = {page: uids for page, uids in readers.items() if uids and page not in cached}
    states = {page: f"{len(readers[page])}×" if readers[page] else "idle" for page in cached}
    states |= dict.fromkeys(free, "free") | {page: " ".join(f"r{uid}" for uid in owners[page]) for page in owners}
    whole = f"{num_pages} pages of {size} tokens"
    counts = f"{len(free)} free, {len(owners)} private, {len(cached)} cached"
    canvas = Canvas(f"Page pool: {whole}", counts)
    says = [f"{whole}: {counts}."]

    def draw(y: float, pages: Sequence[int], labels: list[str]) -> float:
        for index, (page, label) in enumerate(zip(pages, labels, strict=True)):
            x, top = MARGIN + index % _COLUMNS * _CELL, y + index // _COLUMNS * _LINE
            uids = owners.get(page, [])  # several own a page only if the books are wrong
            fill, ink = request_colors(uids[0]) if len(uids) == 1 else ("", "")
            kind, text = ("empty", "muted") if page in free and not uids else ("shared", "text")
            canvas.box(x + 2, top, _CELL - 4, _LINE - 4, kind, fill)
            canvas.text(x + _CELL / 2, top + 18, page, "text" if kind == "empty" else "text strong", fill=ink)
            canvas.text(x + _CELL / 2, top + 34, label, f"{text} small", fill=ink)
        return y + -(-len(pages) // _COLUMNS) * _LINE

    y = draw(38.0, range(num_pages), [states.get(page, "lost") for page in range(num_pages)])
    grey = "grey: cached (3× = read by 3 running requests, idle = by none)"
    canvas.text(MARGIN, y + 14, f"{grey}  ·  colour: private to one  ·  outline: free", "muted small", "start")
    y += 24
    for uid, (pages, length) in rows.items() if lists else ():
        title = f"{lists} r{uid}: {counted(length, 'position')} in {counted(len(pages), 'page')}"
        canvas.text(MARGIN, y + 26, title, "text strong", "start")
        taken = [min(max(length - index * size, 0), size) for index in range(len(pages))]
        y = draw(y + 38, pages, [f"{count}/{size}" for count in taken])
        says.append(f"Request r{uid} reads pages {pages}.")
    return canvas.picture(y + 8, "\n".join(says))


@dataclass(frozen=True, slots=True)
class Array:
    """A piece of memory that a row has been given; lengths are in tokens."""

    row: int  # number of the row, from 1
    start: int
    length: int
    used: int  # from its start on


def array_map(moments: Mapping[str, Sequence[Array]], capacity: int, title: str) -> Picture:
    """Draw which row has been given which part of a memory of ``capacity`` tokens, one bar for each moment."""
    legend = "colour: holds tokens  ·  grey: given to a row, empty  ·  outline: free"
    canvas, y, says = Canvas(title, counted(capacity, "token"), legend), 62.0, [f"{title}: {capacity} tokens."]
    scale = (WIDTH - 2 * MARGIN) / capacity
    for name, arrays in moments.items():
        canvas.text(MARGIN, y + 14, name, "text", "start")
        canvas.box(MARGIN, y + 22, capacity * scale, _LINE - 4)
        for each in arrays:
            (fill, ink), x, width = request_colors(each.row - 1), MARGIN + each.start * scale, each.length * scale
            canvas.box(x, y + 22, width, _LINE - 4, "shared")
            canvas.box(x, y + 22, each.used * scale, _LINE - 4, fill=fill)
            if width >= 60:
                ink = ink if each.used * scale > width / 2 + 24 else ""
                canvas.text(x + width / 2, y + 47, f"row {each.row}", "text small strong", fill=ink)
        given = ", ".join(f"row {each.row} {each.used} of {each.length} from {each.start} on" for each in arrays)
        says.append(f"{name}: {given}.")
        y += 22 + _LINE + 12
    return canvas.picture(y, "\n".join(says))


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
