"""The KV memory as a picture: every page of the pool, and the page-table row of every running request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from minisgl.core import Request
from minisgl.scheduler import KVMemory
from minisgl.viz.svg import WIDTH, Canvas, Picture, request_colors

_COLUMNS = 16
_MARGIN = 14
_CELL = (WIDTH - 2 * _MARGIN) / _COLUMNS
_LINE = 44


def page_map(memory: KVMemory) -> Picture:
    """Which pages are free, private to one request, or cached; and what the page table maps to them.

    A private page has the colour and the name of its request (``r3`` has ``uid`` 3), a cached page is grey and says
    how many running requests read it. In a row of the table, the last page says how many of its positions are taken.

    Args:
        memory: of a live scheduler, ``llm.scheduler.memory``.
    """
    owner, readers = _owners(memory)
    private = sum(request is not None for request in owner)
    counts = f"{memory.pool.num_free} free, {private} private, {int(memory.is_cached.sum())} cached"
    canvas = Canvas()
    canvas.text(
        _MARGIN, 26, f"Page pool: {memory.num_pages} pages of {memory.page_size} tokens", "text strong", "start"
    )
    canvas.text(WIDTH - _MARGIN, 26, counts, anchor="end")
    y = 38
    for page in range(memory.num_pages):
        label = "free" if memory.pool.is_free[page] else f"{readers[page]}×" if readers[page] else "idle"
        top = y + page // _COLUMNS * _LINE
        _draw_page(canvas, page % _COLUMNS, top, page, label, owner[page], bool(memory.is_cached[page]))
    y += -(-memory.num_pages // _COLUMNS) * _LINE + 4
    y = _draw_legend(canvas, y)
    says = [f"{memory.num_pages} pages of {memory.page_size} tokens: {counts}."]
    for slot, request in _running(memory):
        y = _draw_row(canvas, y, memory, slot, request, owner)
        says.append(f"Request r{request.uid} reads pages {memory.row(slot).tolist()}.")
    return canvas.picture(y + 8, "\n".join(says))


def _running(memory: KVMemory) -> Iterator[tuple[int, Request]]:
    """Slots and requests that have pages, in order of arrival."""
    for slot in memory.table.slots.tolist():
        yield slot, memory.table.request(slot)


def _owners(memory: KVMemory) -> tuple[list[Request | None], list[int]]:
    """For each page: the request that it is private to, and the number of running requests that read it."""
    owner: list[Request | None] = [None] * memory.num_pages
    readers = np.zeros(memory.num_pages, dtype=np.int64)
    for slot, request in _running(memory):
        row = memory.row(slot)
        readers[row] += 1
        for page in row[~memory.is_cached[row]].tolist():
            owner[page] = request
    return owner, readers.tolist()


def _draw_page(
    canvas: Canvas, column: int, y: float, page: int, label: str, owner: Request | None, cached: bool
) -> None:
    x = _MARGIN + column * _CELL
    middle = x + _CELL / 2
    width, height = _CELL - 4, _LINE - 4
    if owner is not None:
        fill, ink = request_colors(owner.uid)
        canvas.box(x + 2, y, width, height, fill=fill)
        canvas.text(middle, y + 18, page, "strong", fill=ink)
        canvas.text(middle, y + 34, label if cached or "/" in label else f"r{owner.uid}", "small", fill=ink)
        return
    canvas.box(x + 2, y, width, height, "shared" if cached else "empty")
    canvas.text(middle, y + 18, page, "text strong" if cached else "muted")
    canvas.text(middle, y + 34, label, "text small" if cached else "muted small")


def _draw_legend(canvas: Canvas, y: float) -> float:
    legend = "grey = cached (n× = read by n running requests, idle = by none) · colour = private to a request · outline = free"
    canvas.text(_MARGIN, y + 12, legend, "muted small", "start")
    return y + 24


def _draw_row(
    canvas: Canvas, y: float, memory: KVMemory, slot: int, request: Request, owner: list[Request | None]
) -> float:
    row = memory.row(slot).tolist()
    kv_len = int(memory.table.kv_len[slot])
    title = f"Page table, request r{request.uid}: {kv_len} positions in {len(row)} pages"
    canvas.text(_MARGIN, y + 18, title, "text strong", "start")
    y += 26
    for index, page in enumerate(row):
        taken = min(max(kv_len - index * memory.page_size, 0), memory.page_size)
        top = y + index // _COLUMNS * _LINE
        label = f"{taken}/{memory.page_size}"
        _draw_page(canvas, index % _COLUMNS, top, page, label, owner[page], bool(memory.is_cached[page]))
    return y + -(-len(row) // _COLUMNS) * _LINE + 2
