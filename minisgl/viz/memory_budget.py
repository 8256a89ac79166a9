"""The memory of a device as one bar, cut into what it is used for."""

from __future__ import annotations

from collections.abc import Mapping

from minisgl.errors import ConfigError
from minisgl.kvcache.sizing import free_memory, total_memory
from minisgl.llm import LLM
from minisgl.viz.svg import WIDTH, Canvas, Picture, counted, request_colors
from minisgl.viz.units import byte_size

_MARGIN = 14
_BAR_TOP, _BAR = 64, 40
_NUMBER_WIDTH = 20
_LINE = 26
_FREE = "free"


def memory_budget(parts: Mapping[str, int], total: int, title: str = "Device memory") -> Picture:
    """One bar of ``total`` bytes; what the parts leave is free.

    Each part has a number, on the bar and in the list below it, where its size stands too.

    Args:
        parts: bytes by name, in the order in which they are drawn.
        total: bytes of the whole.
        title: what the whole is.

    Raises:
        ConfigError: a part is negative, or the parts are more than the whole.
    """
    used = sum(parts.values())
    if min(parts.values(), default=0) < 0 or used > total or total <= 0:
        sizes = ", ".join(f"{name} {size}" for name, size in parts.items())
        raise ConfigError(f"memory_budget: {sizes} must be at least 0 and fit into {total} bytes together")
    canvas = Canvas()
    canvas.text(_MARGIN, 26, title, "text strong", "start")
    canvas.text(WIDTH - _MARGIN, 26, byte_size(total), anchor="end")
    scale = (WIDTH - 2 * _MARGIN) / total
    says, start, next_number = [f"{title}: {byte_size(total)}."], 0, float(_MARGIN + _NUMBER_WIDTH / 2)
    for number, (name, size) in enumerate([*parts.items(), (_FREE, total - used)], start=1):
        kind, (fill, ink) = ("empty", ("", "")) if name == _FREE else ("shared", request_colors(number - 1))
        x, width = _MARGIN + start * scale, size * scale
        start += size
        if size:
            canvas.box(x, _BAR_TOP, max(width, 1.5), _BAR, kind, fill)
        y = _BAR_TOP + _BAR + 14 + (number - 1) * _LINE
        canvas.box(_MARGIN, y, 28, 20, kind, fill)
        canvas.text(_MARGIN + 14, y + 15, number, "text strong small", fill=ink)
        canvas.text(_MARGIN + 40, y + 15, name, "text", "start")
        canvas.text(WIDTH - 130, y + 15, byte_size(size), "text", "end")
        canvas.text(WIDTH - _MARGIN, y + 15, f"{100 * size / total:.1f} %", "muted", "end")
        if size:
            next_number = _draw_number(canvas, x, width, number, ink, next_number)
        says.append(f"{number}. {name}: {byte_size(size)}, {100 * size / total:.1f} %.")
    return canvas.picture(_BAR_TOP + _BAR + 20 + (len(parts) + 1) * _LINE, "\n".join(says))


def engine_memory(llm: LLM) -> Picture:
    """The memory budget of a live engine, as it is now.

    Args:
        llm: the engine. On a CPU the device's memory is the machine's, or the container's.
    """
    engine, device = llm.engine, llm.engine.device
    cache = engine.kv_cache
    parts = {"weights": engine.model_bytes, _pages(engine.num_pages, cache.page_size): cache.k.nbytes + cache.v.nbytes}
    if engine.runner_bytes:
        parts["CUDA graphs and their buffers"] = engine.runner_bytes
    total = total_memory(device)
    # Memory that no one has written to yet may still count as free, so that the parts can be more than what is in use.
    parts["all else in use: activations, tables, other programs"] = max(
        0, total - free_memory(device) - sum(parts.values())
    )
    return memory_budget(parts, total, f"Memory of {device.type.replace('cuda', 'the GPU').replace('cpu', 'the CPU')}")


def _pages(num_pages: int, page_size: int) -> str:
    return f"KV cache: {counted(num_pages, 'page')} of {counted(page_size, 'token')}, and the dummy page"


def _draw_number(canvas: Canvas, x: float, width: float, number: int, ink: str, earliest: float) -> float:
    """Number of a part: in it, or above it and away from the number before; returns where the next may stand."""
    middle = x + width / 2
    if width >= _NUMBER_WIDTH:
        canvas.text(middle, _BAR_TOP + 25, number, "text strong", fill=ink)
        return earliest
    place = min(max(middle, earliest), WIDTH - _MARGIN - _NUMBER_WIDTH / 2)
    canvas.path(f"M{place:g} {_BAR_TOP - 10}L{middle:g} {_BAR_TOP}", "rule")
    canvas.text(place, _BAR_TOP - 13, number, "text small strong")
    return place + _NUMBER_WIDTH
