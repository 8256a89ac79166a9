"""The KV memory as a picture: every page of the pool, and the page-table row of every running request."""

from __future__ import annotations

import numpy as np

from minisgl.core import Request
from minisgl.scheduler import KVMemory
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors

_COLUMNS = 16
_MARGIN = 14
_CELL = (WIDTH - 2 * _MARGIN) / _COLUMNS
_LINE = 44
_LEGEND = "grey: cached (3× = read by 3 running requests, idle = by none)  ·  colour: private to one  ·  outline: free"


def page_map(memory: KVMemory) -> Picture:
    """Which pages are free, private to one request, or cached; and what the page table maps to them.

    A private page has the colour and the name of its request (``r3`` has ``uid`` 3), a cached page is grey and says
    how many running requests read it. In the rows of the page table, a page says how many of its positions are taken.

    Args:
        memory: of a live scheduler, ``llm.scheduler.memory``.
    """
    return _PageMap(memory).draw()


class _PageMap:
    """One drawing: ``y`` is how far it has come.

    Args:
        memory: what is drawn.
    """

    def __init__(self, memory: KVMemory) -> None:
        self.memory = memory
        self.canvas = Canvas()
        self.y = 0.0
        self.running: list[tuple[int, Request]] = [
            (slot, memory.table.request(slot)) for slot in memory.table.slots.tolist()
        ]
        self.readers = np.zeros(memory.num_pages, dtype=np.int64)
        self.owner: dict[int, Request] = {}
        for slot, request in self.running:
            row = memory.row(slot)
            self.readers[row] += 1
            self.owner.update(dict.fromkeys(row[~memory.is_cached[row]].tolist(), request))

    def draw(self) -> Picture:
        memory = self.memory
        whole = f"{memory.num_pages} pages of {memory.page_size} tokens"
        counts = f"{memory.pool.num_free} free, {len(self.owner)} private, {int(memory.is_cached.sum())} cached"
        self._title(f"Page pool: {whole}")
        self.canvas.text(WIDTH - _MARGIN, self.y - 12, counts, anchor="end")
        self._pages(range(memory.num_pages), [self._state(page) for page in range(memory.num_pages)])
        self.canvas.text(_MARGIN, self.y + 14, _LEGEND, "muted small", "start")
        self.y += 24
        says = [f"{whole}: {counts}."]
        for slot, request in self.running:
            row, kv_len = memory.row(slot).tolist(), int(memory.table.kv_len[slot])
            size = f"{counted(kv_len, 'position')} in {counted(len(row), 'page')}"
            self._title(f"Page table, request r{request.uid}: {size}")
            self._pages(row, [self._taken(kv_len, index) for index in range(len(row))])
            says.append(f"Request r{request.uid} reads pages {row}.")
        return self.canvas.picture(self.y + 8, "\n".join(says))

    def _state(self, page: int) -> str:
        if self.memory.pool.is_free[page]:
            return "free"
        if page in self.owner:
            return f"r{self.owner[page].uid}"
        return f"{self.readers[page]}×" if self.readers[page] else "idle"

    def _taken(self, kv_len: int, index: int) -> str:
        """How many positions of a row's page number ``index`` are in use."""
        size = self.memory.page_size
        return f"{min(max(kv_len - index * size, 0), size)}/{size}"

    def _title(self, text: str) -> None:
        self.canvas.text(_MARGIN, self.y + 26, text, "text strong", "start")
        self.y += 38

    def _pages(self, pages: range | list[int], labels: list[str]) -> None:
        for index, (page, label) in enumerate(zip(pages, labels, strict=True)):
            x = _MARGIN + index % _COLUMNS * _CELL
            self._page(x, self.y + index // _COLUMNS * _LINE, page, label)
        self.y += -(-len(pages) // _COLUMNS) * _LINE

    def _page(self, x: float, y: float, page: int, label: str) -> None:
        kind, fill, ink = "shared", "", ""
        if page in self.owner:
            fill, ink = request_colors(self.owner[page].uid)
        elif self.memory.pool.is_free[page]:
            kind = "empty"
        text = "muted" if kind == "empty" else "text"
        self.canvas.box(x + 2, y, _CELL - 4, _LINE - 4, kind, fill)
        self.canvas.text(x + _CELL / 2, y + 18, page, text if kind == "empty" else "text strong", fill=ink)
        self.canvas.text(x + _CELL / 2, y + 34, label, f"{text} small", fill=ink)
