"""What loading does: the bytes of a safetensors file, and the memory of a process that loads."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, request_colors, round_step
from minisgl.errors import MiniSGLError

_STRIP = 44.0
_SMALLEST_NAME = 7.5
"""Pixels that one character of a name takes."""

# -- the bytes of a file -----------------------------------------------------------------------------------------------


def file_map(path: Path, group: str) -> Picture:
    """Draw a safetensors file three times: whole, the tensors whose names begin with ``group``, and its first bytes.

    The tensors of a group lie beside each other, as they do in files that the library has written.
    """
    with path.open("rb") as stream:
        first = stream.read(8)
        length = int.from_bytes(first, "little")
        text = stream.read(length)
    entries = {name: entry for name, entry in json.loads(text).items() if name != "__metadata__"}
    start, total = 8 + length, path.stat().st_size
    spans = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    inside = [(begin, end, name) for begin, end, name in spans if name.startswith(group)]
    low, high = inside[0][0], inside[-1][1]

    canvas = Canvas(f"{path.name}: {total:,} bytes, {len(entries)} tensors")
    whole = _Strip(canvas, 44, 0, total)
    for number, (begin, end, name) in enumerate(_blocks(spans, group)):
        color = 1 if name == group else 0
        whole.piece(start + begin, start + end, _short(name), color, light=name != group and number % 2 == 1)
    zoom = _Strip(canvas, whole.y + _STRIP + 30, start + low, start + high)
    whole.zoom(zoom)
    zoom.label(f"{group}*: {len(inside)} tensors, bytes {start + low:,} to {start + high:,}")
    for number, (begin, end, name) in enumerate(inside):
        zoom.piece(start + begin, start + end, _short(name), 1, light=number % 2 == 1)
    head = _Strip(canvas, zoom.y + _STRIP + 44, 0, 33)
    head.label(f"the first 33 bytes: 8 say that the header is {length:,} bytes long, then the header begins")
    head.piece(0, 8, first.hex(" "), 2)
    head.piece(8, 33, f"{text[:25].decode()} …", 3)
    says = [
        f"{path.name}: {total} bytes. The first 8 give the length of the header, {length} bytes of JSON.",
        f"Then {len(entries)} tensors: " + ", ".join(name for _, _, name in _blocks(spans, group)) + ".",
        f"{group}: "
        + ", ".join(f"{name.removeprefix(group)} {end - begin} bytes" for begin, end, name in inside)
        + ".",
    ]
    return canvas.picture(head.y + _STRIP + 34, "\n".join(says))


def _short(name: str) -> str:
    return name.removesuffix(".weight").rstrip(".").split(".")[-1]


def _blocks(spans: Sequence[tuple[int, int, str]], group: str) -> list[tuple[int, int, str]]:
    """Neighbours whose names begin alike, up to as many dots as ``group`` has, as one block each."""
    dots, blocks = group.rstrip(".").count(".") + 1, list[tuple[int, int, str]]()
    for begin, end, name in spans:
        parts = name.split(".")
        block = ".".join(parts[:dots]) + "." if len(parts) > dots + 1 else name
        if blocks and blocks[-1][2] == block:
            blocks[-1] = blocks[-1][0], end, block
        else:
            blocks.append((begin, end, block))
    return blocks


@dataclass(frozen=True)
class _Strip:
    """Bytes ``start`` to ``stop`` of a file as one bar across the card."""

    canvas: Canvas
    y: float
    start: int
    stop: int

    def x(self, byte: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (byte - self.start) / (self.stop - self.start)

    def piece(self, begin: int, end: int, name: str, color: int, light: bool = False) -> None:
        """Bytes ``begin`` to ``end``, with their name where there is room. Neighbours differ by a gap of a pixel."""
        left, right = self.x(begin), self.x(end)
        fill, ink = request_colors(color)
        if light:
            self.canvas.box(left, self.y, max(right - left, 0.5), _STRIP, "shared")
            ink = ""
        else:
            self.canvas.box(left, self.y, max(right - left, 0.5), _STRIP, fill=fill)
        if len(name) * _SMALLEST_NAME < right - left:
            self.canvas.text((left + right) / 2, self.y + _STRIP / 2 + 5, name, "text small", fill=ink)

    def zoom(self, other: _Strip) -> None:
        """Lines from the bytes of another strip to that strip."""
        for byte in (other.start, other.stop):
            self.canvas.path(f"M{self.x(byte):.1f} {self.y + _STRIP:g}L{other.x(byte):.1f} {other.y:g}", "rule")

    def label(self, text: str) -> None:
        self.canvas.text(MARGIN, self.y + _STRIP + 18, text, "muted small", "start")


# -- the memory of a process -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """Seconds since the first stage, and megabytes since then: the process's own, and pages of files."""

    seconds: float
    own: float
    pages: float

    @property
    def resident(self) -> float:
        """Megabytes of both."""
        return self.own + self.pages


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What `watch_memory` saw of a process."""

    samples: tuple[Sample, ...]
    stages: dict[str, Sample]  # name → when it was over
    error: str  # that ended it, or nothing

    @property
    def peak(self) -> float:
        """Most resident megabytes."""
        return max(sample.resident for sample in self.samples)

    @property
    def seconds(self) -> float:
        return self.samples[-1].seconds

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds and resident megabytes."""
        return [(sample.seconds, sample.resident) for sample in self.samples]


def watch_memory(load: Callable[..., Iterator[str]], *arguments: object) -> LoadRun:
    """Run a generator function in a fresh process, and watch the memory of that.

    The function imports what it needs. Its first ``yield`` starts the clock and sets memory to zero; each further one
    ends a stage, whose name it yields. A `MiniSGLError` ends it and is kept. Systems other than Linux don't tell
    pages of files from the rest: there, all memory is the process's own.

    Args:
        arguments: of the function, which gets them as strings.
    """
    request = json.dumps([dedent(inspect.getsource(load)), load.__name__, list(map(str, arguments))])
    command = [sys.executable, "-m", "minisgl.book.loading"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MiniSGLError(f"{load.__name__} failed in a process of its own:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout.splitlines()[-1])
    stages = {name: Sample(*values) for name, values in answer["stages"]}
    return LoadRun(tuple(Sample(*values) for values in answer["samples"]), stages, answer["error"])


def _watch(source: str, name: str, arguments: Sequence[str]) -> dict[str, Any]:
    """In the fresh process: run the function, and return what `watch_memory` needs."""
    import psutil

    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    process, done = psutil.Process(), threading.Event()

    def memory() -> tuple[float, float]:
        info = process.memory_info()
        pages = getattr(info, "shared", 0)
        return (info.rss - pages) / 1e6, pages / 1e6

    running = namespace[name](*arguments)
    next(running)
    start, (own, pages) = time.perf_counter(), memory()
    samples: list[tuple[float, float, float]] = []
    stages: list[tuple[str, tuple[float, float, float]]] = []

    def sample() -> tuple[float, float, float]:
        now = memory()
        samples.append((time.perf_counter() - start, now[0] - own, now[1] - pages))
        return samples[-1]

    def keep_looking() -> None:
        while not done.wait(0.003):
            sample()

    watcher, error = threading.Thread(target=keep_looking), ""
    watcher.start()
    try:
        for stage in running:
            stages.append((stage, sample()))
    except MiniSGLError as problem:
        error = str(problem)
    finally:
        done.set()
        watcher.join()
    if error or not stages:
        sample()
    last = samples[-1] if error or not stages else stages[-1][1]
    return {"samples": [each for each in sorted(samples) if each <= last], "stages": stages, "error": error}


def memory_stages(run: LoadRun, title: str) -> Picture:
    """Draw a process's memory over time as two areas, its own and pages of files, with a line where each stage ends."""
    left, right, top, bottom = 76.0, 746.0, 74.0, 270.0
    most, last = 1.12 * run.peak, run.seconds

    def x(seconds: float) -> float:
        return left + (right - left) * seconds / last

    def y(megabytes: float) -> float:
        return bottom - (bottom - top) * max(megabytes, 0.0) / most

    canvas = Canvas(title)
    step = round_step(most / 6)
    for tick in range(int(most / step) + 1):
        canvas.path(f"M{left:g} {y(tick * step):.1f}H{right:g}", "rule")
        canvas.text(left - 8, y(tick * step) + 4, f"{tick * step:,.0f} MB" if tick else "0", "muted small", "end")
    upper = [f"{x(each.seconds):.1f} {y(each.resident):.1f}" for each in run.samples]
    between = [f"{x(each.seconds):.1f} {y(each.own):.1f}" for each in run.samples]
    corner = f"{x(last):.1f} {bottom:g}L{x(run.samples[0].seconds):.1f} {bottom:g}Z"
    canvas.path(f"M{'L'.join(between)}L{corner}", fill=request_colors(0)[0])
    canvas.path(f"M{'L'.join(upper + between[::-1])}Z", fill=request_colors(1)[0])
    says, before = [f"{title}."], 0.0
    for number, (name, end) in enumerate(run.stages.items()):
        canvas.path(f"M{x(end.seconds):.1f} {top - 22:g}V{bottom:g}", "line dashed")
        middle = min(max((x(before) + x(end.seconds)) / 2, left + 12), right - 12)
        canvas.text(middle, top - 8, number + 1, "text strong")
        before = end.seconds
        column, row = number % 2, number // 2
        canvas.text(MARGIN + 366 * column, bottom + 48 + 22 * row, f"{number + 1}  {name}", "text small", "start")
        says.append(f"{number + 1}. {name}: ends at {end.seconds:.1f} s with {end.resident:,.0f} MB.")
    canvas.text(right, bottom + 20, f"{last:.1f} s", "muted small", "end")
    legend = bottom + 38 + 22 * ((len(run.stages) + 1) // 2)
    for number, name in enumerate(("the process's own memory", "pages of the file")):
        canvas.box(MARGIN + 366 * number, legend + 4, 22, 14, fill=request_colors(number)[0])
        canvas.text(MARGIN + 32 + 366 * number, legend + 16, name, "text small", "start")
    says.append(f"At most {run.peak:,.0f} MB.")
    return canvas.picture(legend + 32, "\n".join(says))


if __name__ == "__main__":
    print(json.dumps(_watch(*json.load(sys.stdin))))
