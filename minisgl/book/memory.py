"""Memory: the pages of the KV cache, the pool from step to step, and the budget of a device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, byte_size, counted, request_colors, round_step
from minisgl.errors import ConfigError
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
    table, rows = memory.table, dict[int, tuple[list[int], int]]()
    for slot in table.slots.tolist():
        pages = memory.row(slot).tolist()
        given_back = int(table.num_pages[slot]) - len(pages)
        rows[table.request(slot).uid] = pages, int(table.kv_len[slot]) - given_back * memory.page_size
    cached, free = (set(np.flatnonzero(which).tolist()) for which in (memory.is_cached, memory.pool.is_free))
    return _draw_pages(memory.num_pages, memory.page_size, free, cached, rows, "Page table, request")


def toy_page_map(pool: PagePool, caches: Mapping[int, PagedCache], page_lists: bool = True) -> Picture:
    """Draw the toy engine's pages as `page_map` does. A page with several readers, or with none in a row, is cached.

    ``caches`` are those of the rows that run, by numbers that give them names and colours. ``page_lists`` draws each
    row's list of pages below the pool.
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
    readers = {page: [uid for uid, (pages, _) in rows.items() if page in pages] for page in range(num_pages)}
    owners = {page: uids for page, uids in readers.items() if uids and page not in cached}
    states = {page: f"{len(readers[page])}×" if readers[page] else "idle" for page in cached}
    states |= dict.fromkeys(free, "free") | {page: " ".join(f"r{uid}" for uid in owners[page]) for page in owners}
    whole = f"{num_pages} pages of {size} tokens"
    counts = f"{len(free)} free, {len(owners)} private, {len(cached)} cached"
    canvas = Canvas(f"Page pool: {whole}", counts, says=f"{whole}: {counts}.")

    def draw(y: float, labels: Sequence[tuple[int, str]]) -> float:
        for index, (page, label) in enumerate(labels):
            x, top = MARGIN + index % _COLUMNS * _CELL, y + index // _COLUMNS * _LINE
            uids = owners.get(page, [])  # several own a page only if the books are wrong
            color = uids[0] if len(uids) == 1 else None
            lines, kind = ((page, "text strong"), (label, "text small")), "shared"
            if page in free and not uids:
                lines, kind = ((page, "text"), (label, "muted small")), "empty"
            canvas.cell(x + 2, top, _CELL - 4, _LINE - 4, *lines, color=color, kind=kind)
        return y + -(-len(labels) // _COLUMNS) * _LINE

    y = draw(38.0, [(page, states.get(page, "lost")) for page in range(num_pages)])
    grey = "grey: cached (3× = read by 3 running requests, idle = by none)"
    canvas.note(y + 14, f"{grey}  ·  colour: private to one  ·  outline: free")
    y += 24
    for uid, (pages, length) in rows.items() if lists else ():
        title = f"{lists} r{uid}: {counted(length, 'position')} in {counted(len(pages), 'page')}"
        canvas.text(MARGIN, y + 26, title, "text strong", "start")
        taken = (min(max(length - start, 0), size) for start in range(0, len(pages) * size, size))
        y = draw(y + 38, [(page, f"{count}/{size}") for page, count in zip(pages, taken, strict=True)])
        canvas.says.append(f"Request r{uid} reads pages {pages}.")
    return canvas.picture(y + 8)


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
    canvas = Canvas(title, counted(capacity, "token"), legend, f"{title}: {capacity} tokens.")
    y, height, scale = 84.0, _LINE - 4, (WIDTH - 2 * MARGIN) / capacity
    for name, arrays in moments.items():
        canvas.text(MARGIN, y - 8, name, "text", "start")
        canvas.box(MARGIN, y, capacity * scale, height)
        for each in arrays:
            x, width, used = MARGIN + each.start * scale, each.length * scale, each.used * scale
            canvas.box(x, y, width, height, "shared")
            canvas.cell(x, y, used, height, color=each.row - 1)
            if width >= 60:
                middle, ink = (used + width) / 2, ""
                if used > width / 2:  # the name stands in the larger part
                    middle, ink = used / 2, request_colors(each.row - 1)[1]
                canvas.text(x + middle, y + 25, f"row {each.row}", "text small strong", fill=ink)
        given = ", ".join(f"row {each.row} {each.used} of {each.length} from {each.start} on" for each in arrays)
        canvas.says.append(f"{name}: {given}.")
        y += _LINE + 34
    return canvas.picture(y - 22)


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
        slots, table = memory.table.slots, memory.table
        final = memory.most_pages(table.token_len[slots], table.max_len[slots])
        promised = int(np.maximum(final - table.num_pages[slots], 0).sum())
        return cls(memory.num_pages - memory.available, memory.cache.num_evictable, promised, len(slots), preempted)


def pool_use(moments: Sequence[PoolUse], num_pages: int, title: str, span: int = 0) -> Picture:
    """Draw how much of the pool is read, idle, free and promised from step to step, and how many requests run.

    The picture has room for ``span`` steps, if these are more than there are moments: to compare pictures.
    """
    span = max(span, len(moments))
    width = min((_RIGHT - _LEFT) / span, 24.0)
    mean = sum(moment.read for moment in moments) / len(moments)
    preempted = counted(sum(moment.preempted for moment in moments), "preemption")
    title = f"{title}: {counted(len(moments), 'step')}, {mean / num_pages:.0%} of the pool read on average, {preempted}"
    legend = "blue: read by running requests  ·  grey: cached, idle  ·  dashed: promised to them, too  ·  ×: preempted"
    canvas = Canvas(title, legend=legend)
    most = max(moment.running for moment in moments)

    def steps(counts: Iterable[int], highest: int, top: float = _TOP, bottom: float = _BOTTOM) -> str:
        """A path with a step for each count."""
        heights = [bottom - (bottom - top) * min(count, highest) / max(highest, 1) for count in counts]
        points = [f"V{y:.1f}H{_LEFT + (step + 1) * width:.1f}" for step, y in enumerate(heights)]
        return f"M{_LEFT:g} {heights[0]:.1f}{''.join(points)}"

    close = f"V{_BOTTOM:g}H{_LEFT:g}Z"  # such a path to an area
    canvas.path(f"M{_LEFT:g} {_TOP:g}H{_LEFT + len(moments) * width:g}{close}", "empty")
    canvas.path(steps((moment.read + moment.idle for moment in moments), num_pages) + close, "shade")
    canvas.path(steps((moment.read for moment in moments), num_pages) + close, fill=request_colors(0)[0])
    canvas.path(steps((moment.read + moment.promised for moment in moments), num_pages), "line dashed")
    running = steps((moment.running for moment in moments), most, _ROWS_TOP, _ROWS_BOTTOM)
    canvas.path(f"{running}V{_ROWS_BOTTOM:g}H{_LEFT:g}Z", "shade")
    for step, moment in enumerate(moments):
        if moment.preempted:
            canvas.text(_LEFT + (step + 0.5) * width, _TOP - 6, "×", "text strong")
    labels = {97: num_pages, 166: "pages", 236: 0, 260: most, 278: "running", _ROWS_BOTTOM + 18: "step"}
    for y, label in labels.items():
        canvas.text(_LEFT - 8, y, label, "muted small", "end")
    for step in range(0, span, max(1, int(round_step(span / 16)))):
        canvas.text(_LEFT + (step + 0.5) * width, _ROWS_BOTTOM + 18, step, "muted small")
    read = " ".join(str(moment.read) for moment in moments)
    canvas.says += [f"{title}, at most {counted(most, 'request')} running.", f"Pages read: {read}."]
    return canvas.picture(_ROWS_BOTTOM + 28)


_BAR_TOP, _BAR = 64, 40
_NUMBER_WIDTH = 20


def memory_budget(parts: Mapping[str, int], total: int, title: str = "Device memory") -> Picture:
    """Draw one bar of ``total`` bytes cut into numbered parts, which are listed below; the rest is free.

    ``parts`` has bytes by name. Raises `ConfigError` if a part is negative, or the parts are more than the whole.
    """
    used = sum(parts.values())
    if min(parts.values(), default=0) < 0 or used > total or total <= 0:
        sizes = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise ConfigError(f"memory_budget: {sizes} must be at least 0 and fit into {total} bytes together")
    canvas, scale = Canvas(title, byte_size(total), says=f"{title}: {byte_size(total)}."), (WIDTH - 2 * MARGIN) / total
    x, next_number = float(MARGIN), MARGIN + _NUMBER_WIDTH / 2
    for number, (name, size) in enumerate([*parts.items(), ("free", total - used)], start=1):
        color = number - 1 if number <= len(parts) else None
        y, width = _BAR_TOP + _BAR + 14 + (number - 1) * 26, size * scale
        canvas.cell(MARGIN, y, 28, 20, (number, "text strong small"), color=color)
        canvas.text(MARGIN + 40, y + 15, name, "text", "start")
        canvas.text(WIDTH - 130, y + 15, byte_size(size), "text", "end")
        canvas.text(WIDTH - MARGIN, y + 15, f"{100 * size / total:.1f} %", "muted", "end")
        if size:
            has_room = width >= _NUMBER_WIDTH
            canvas.cell(x, _BAR_TOP, max(width, 1.5), _BAR, *[(number, "text strong")] * has_room, color=color)
            if not has_room:  # then above the bar, and away from the number before
                middle = x + width / 2
                place = min(max(middle, next_number), WIDTH - MARGIN - _NUMBER_WIDTH / 2)
                canvas.path(f"M{place:g} {_BAR_TOP - 10}L{middle:g} {_BAR_TOP}", "rule")
                canvas.text(place, _BAR_TOP - 13, number, "text small strong")
                next_number = place + _NUMBER_WIDTH
        x += width
        canvas.says.append(f"{number}. {name}: {byte_size(size)}, {100 * size / total:.1f} %.")
    return canvas.picture(_BAR_TOP + _BAR + 20 + (len(parts) + 1) * 26)
