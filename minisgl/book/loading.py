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
from itertools import groupby
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import msgspec

from minisgl.book.svg import MARGIN, WIDTH, Canvas, Picture, request_colors, round_step
from minisgl.errors import MiniSGLError

_STRIP = 44.0
_SMALLEST_NAME = 7.5  # pixels that one character of a name takes


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
    blocks = _blocks(spans, group)
    whole = _Strip(canvas, 44, 0, total)
    for number, (begin, end, name) in enumerate(blocks):
        light = name != group and number % 2 == 1
        whole.piece(start + begin, start + end, _short(name), None if light else int(name == group))
    zoom = _Strip(canvas, whole.y + _STRIP + 30, start + low, start + high)
    for byte in (zoom.start, zoom.stop):
        canvas.path(f"M{whole.x(byte):.1f} {whole.y + _STRIP:g}L{zoom.x(byte):.1f} {zoom.y:g}", "rule")
    canvas.note(zoom.y + _STRIP + 18, f"{group}*: {len(inside)} tensors, bytes {start + low:,} to {start + high:,}")
    for number, (begin, end, name) in enumerate(inside):
        zoom.piece(start + begin, start + end, _short(name), None if number % 2 else 1)
    head = _Strip(canvas, zoom.y + _STRIP + 44, 0, 33)
    words = f"the first 33 bytes: 8 say that the header is {length:,} bytes long, then the header begins"
    canvas.note(head.y + _STRIP + 18, words)
    head.piece(0, 8, first.hex(" "), 2)
    head.piece(8, 33, f"{text[:25].decode()} …", 3)
    sizes = ", ".join(f"{name.removeprefix(group)} {end - begin} bytes" for begin, end, name in inside)
    canvas.says += [
        f"{path.name}: {total} bytes. The first 8 give the length of the header, {length} bytes of JSON.",
        f"Then {len(entries)} tensors: {', '.join(name for *_, name in blocks)}.",
        f"{group}: {sizes}.",
    ]
    return canvas.picture(head.y + _STRIP + 34)


def _short(name: str) -> str:
    return name.removesuffix(".weight").rstrip(".").split(".")[-1]


def _blocks(spans: Sequence[tuple[int, int, str]], group: str) -> list[tuple[int, int, str]]:
    """Neighbours whose names begin alike, up to as many dots as ``group`` has, as one block each."""
    dots = group.rstrip(".").count(".") + 1

    def block(span: tuple[int, int, str]) -> str:
        parts = span[2].split(".")
        return ".".join(parts[:dots]) + "." if len(parts) > dots + 1 else span[2]

    found = ((name, list(members)) for name, members in groupby(spans, key=block))
    return [(members[0][0], members[-1][1], name) for name, members in found]


@dataclass(frozen=True)
class _Strip:
    """Bytes ``start`` to ``stop`` of a file as one bar across the card."""

    canvas: Canvas
    y: float
    start: int
    stop: int

    def x(self, byte: int) -> float:
        return MARGIN + (WIDTH - 2 * MARGIN) * (byte - self.start) / (self.stop - self.start)

    def piece(self, begin: int, end: int, name: str, color: int | None) -> None:
        """Bytes ``begin`` to ``end``, with their name where there is room."""
        left, width = self.x(begin), self.x(end) - self.x(begin)
        words = [(name, "text small")] * (len(name) * _SMALLEST_NAME < width)
        self.canvas.cell(left, self.y, max(width, 0.5), _STRIP, *words, color=color, kind="shared")


class Sample(NamedTuple):
    """Seconds since the first stage, and megabytes since then: the process's own, and pages of files."""

    seconds: float
    own: float
    pages: float

    @property
    def resident(self) -> float:
        return self.own + self.pages


@dataclass(frozen=True, slots=True)
class LoadRun:
    """What `watch_memory` saw of a process."""

    samples: list[Sample]
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

    The function imports what it needs, and gets its arguments as strings. Its first ``yield`` starts the clock and sets
    memory to zero; each further one ends a stage, whose name it yields. A `MiniSGLError` ends it and is kept. Systems
    other than Linux don't tell pages of files from the rest: there, all memory is the process's own.
    """
    request = json.dumps([dedent(inspect.getsource(load)), load.__name__, list(map(str, arguments))])
    command = [sys.executable, "-m", "minisgl.book.loading"]
    done = subprocess.run(command, input=request, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MiniSGLError(f"{load.__name__} failed in a process of its own:\n{done.stderr[-2000:]}")
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=LoadRun)


def _watch(source: str, name: str, arguments: Sequence[str]) -> LoadRun:
    """Run the function in this process, which is a fresh one."""
    import psutil

    namespace: dict[str, Any] = {}
    exec(compile(source, f"<{name}>", "exec"), namespace)
    process, over = psutil.Process(), threading.Event()
    samples: list[Sample] = []

    def sample() -> Sample:
        info = process.memory_info()
        pages = getattr(info, "shared", 0)
        samples.append(Sample(time.perf_counter(), (info.rss - pages) / 1e6, pages / 1e6))
        return samples[-1]

    def keep_looking() -> None:
        while not over.wait(0.003):
            sample()

    def since_then(each: Sample) -> Sample:
        return Sample(*(value - first for value, first in zip(each, start, strict=True)))

    running, watcher, error = namespace[name](*arguments), threading.Thread(target=keep_looking), ""
    next(running)
    start, stages = sample(), {}
    watcher.start()
    try:
        for stage in running:
            stages[stage] = sample()
    except MiniSGLError as problem:
        error = str(problem)
    finally:
        over.set()
        watcher.join()
    last = sample() if error or not stages else max(stages.values())
    seen = [since_then(each) for each in sorted(samples) if each <= last]
    return LoadRun(seen, {stage: since_then(each) for stage, each in stages.items()}, error)


def memory_stages(run: LoadRun, title: str) -> Picture:
    """Draw a process's memory over time as two areas, its own and pages of files, with a line where each stage ends."""
    left, right, top, bottom, column = 76.0, 746.0, 74.0, 270.0, 366
    canvas, most = Canvas(title, says=f"{title}."), 1.12 * run.peak

    def x(seconds: float) -> float:
        return left + (right - left) * seconds / run.seconds

    def y(megabytes: float) -> float:
        return bottom - (bottom - top) * max(megabytes, 0.0) / most

    step = max(1, int(round_step(most / 6)))
    for tick in range(0, int(most) + 1, step):
        canvas.path(f"M{left:g} {y(tick):.1f}H{right:g}", "rule")
        canvas.text(left - 8, y(tick) + 4, f"{tick:,} MB" if tick else "0", "muted small", "end")
    upper = [f"{x(each.seconds):.1f} {y(each.resident):.1f}" for each in run.samples]
    between = [f"{x(each.seconds):.1f} {y(each.own):.1f}" for each in run.samples]
    floor = [f"{x(seconds):.1f} {bottom:g}" for seconds in (run.seconds, run.samples[0].seconds)]
    canvas.path(f"M{'L'.join(between + floor)}Z", fill=request_colors(0)[0])
    canvas.path(f"M{'L'.join(upper + between[::-1])}Z", fill=request_colors(1)[0])
    before, legend = 0.0, bottom + 42 + 22 * -(-len(run.stages) // 2)
    for number, (name, end) in enumerate(run.stages.items()):
        canvas.path(f"M{x(end.seconds):.1f} {top - 22:g}V{bottom:g}", "line dashed")
        middle = min(max((x(before) + x(end.seconds)) / 2, left + 12), right - 12)
        canvas.text(middle, top - 8, number + 1, "text strong")
        place = MARGIN + column * (number % 2), bottom + 48 + 22 * (number // 2)
        canvas.text(*place, f"{number + 1}  {name}", "text small", "start")
        canvas.says.append(f"{number + 1}. {name}: ends at {end.seconds:.1f} s with {end.resident:,.0f} MB.")
        before = end.seconds
    canvas.text(right, bottom + 20, f"{run.seconds:.1f} s", "muted small", "end")
    for number, name in enumerate(("the process's own memory", "pages of the file")):
        canvas.cell(MARGIN + column * number, legend, 22, 14, color=number)
        canvas.text(MARGIN + 32 + column * number, legend + 12, name, "text small", "start")
    canvas.says.append(f"At most {run.peak:,.0f} MB.")
    return canvas.picture(legend + 28)


if __name__ == "__main__":
    print(msgspec.json.encode(_watch(*json.load(sys.stdin))).decode())
