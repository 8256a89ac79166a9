"""Numbers of a GPU in a book that half of its readers run without one."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import minisgl
from minisgl.errors import ConfigError
from minisgl.trace import Trace
from minisgl.viz.markdown import table

if TYPE_CHECKING:
    from minisgl.bench.report import Report

RESULTS = Path(minisgl.__file__).parent.parent / "benchmarks" / "results"
"""Of the checkout that Python runs."""

Cell = str | int | float

_OPTION = re.compile(r"(?<!\S)(--[a-z-]+)")
"""Of a command. It is shown as code, or a page would make a dash of the two hyphens."""


@dataclass(frozen=True, slots=True)
class MeasuredTable:
    """A table of a benchmark.

    Args:
        title: what is measured.
        columns: headings, units included.
        rows: one cell a column.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]

    def __str__(self) -> str:
        rows = [[_OPTION.sub(r"`\1`", cell) if isinstance(cell, str) else cell for cell in row] for row in self.rows]
        return f"**{self.title}**\n\n{table(self.columns, rows, shown=_three_digits).text}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Tables of a benchmark, run here or recorded elsewhere. What shows them says which.

    Args:
        name: the benchmark's.
        origin: a sentence: where the numbers come from, and why from there.
        live: True if they were measured here and now.
        tables: the results.
        traces: of some of the steps, by name.
    """

    name: str
    origin: str
    live: bool
    tables: Sequence[MeasuredTable]
    traces: Mapping[str, Trace] = field(default_factory=dict)

    def show(self, title_part: str | None = None) -> None:
        """Display the tables whose title has this part, or all, below the sentence on their origin."""
        _display(replace(self, tables=self._find(title_part)))

    def show_origin(self) -> None:
        """Display the sentence alone, above a picture of the numbers or the traces."""
        _display(replace(self, tables=()))

    def rows(self, title_part: str) -> list[dict[str, Cell]]:
        """Rows of the one table whose title has this part: each a cell by its column's heading."""
        found = self._find(title_part)
        if len(found) > 1:
            raise ConfigError(f"rows: {title_part!r} is part of several titles: {_listed(found)}")
        return [dict(zip(found[0].columns, row, strict=True)) for row in found[0].rows]

    def _find(self, title_part: str | None) -> list[MeasuredTable]:
        found = [each for each in self.tables if title_part is None or title_part in each.title]
        if not found:
            raise ConfigError(f"no title of {self.name!r} has the part {title_part!r}: {_listed(self.tables)}")
        return found

    def __repr__(self) -> str:
        return "\n\n".join([f"*{self.origin}*", *map(str, self.tables)])

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """The display, and beside it the mark by which `tools.notebooks` counts what was not run."""
        text = repr(self)
        mark = {"name": self.name, "live": self.live, "origin": self.origin}
        return {"text/markdown": text, "text/plain": text}, {"minisgl.measured": mark}


def measured(name: str, run: Callable[[], Report], gpus: int = 1) -> Measured:
    """Measure on this machine's GPUs; where there are too few, take the result that is kept in ``benchmarks/results``.

    Args:
        name: of the kept result, without ``.json``.
        run: measures.
        gpus: CUDA devices that it takes.

    Raises:
        ConfigError: there are neither so many CUDA devices nor a kept result.
    """
    if _enough(gpus):
        origin, report = f"Measured just now, on this machine's {torch.cuda.get_device_name()}.", run()
        tables = [MeasuredTable(each.title, each.columns, each.rows) for each in report.tables]
        return Measured(name, origin, True, tables, report.traces)
    record = _read(name)
    chips = f"one {_chip(record)}" if gpus == 1 else f"{gpus} {_chip(record)}s"
    return _of(record, name, f"{_too_few(gpus)} here: ", chips)


def kept(name: str) -> Measured:
    """The result in ``benchmarks/results``, on every machine: it took longer than a notebook may.

    Args:
        name: of the result, without ``.json``.

    Raises:
        ConfigError: there is none.
    """
    record = _read(name)
    cores, load = (record["hardware"][each] for each in ("cores", "load_average_before"))
    return _of(record, name, "Kept: ", f"{_chip(record)} ({cores} cores, load average {load} before)")


def has_cuda(instead: str) -> bool:
    """Whether a cell can run what only a CUDA device can. Where there is none, print that, and what it does instead.

    Args:
        instead: half a sentence, such as ``"nothing is captured"``.
    """
    if not _enough(1):
        print(f"{_too_few(1)} here: {instead}.")
    return _enough(1)


def _enough(gpus: int) -> bool:
    return torch.cuda.is_available() and torch.cuda.device_count() >= gpus


def _too_few(gpus: int) -> str:
    return "No CUDA device" if gpus == 1 else f"Fewer than {gpus} CUDA devices"


def _read(name: str) -> dict[str, Any]:
    try:
        record: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name}: nothing is measured here, and there is no benchmarks/results/{name}.json beside the package to "
            "show instead. Run from a checkout (`pip install -e .`), or what takes GPUs on a machine with as many GPUs"
        ) from error
    return record


def _of(record: dict[str, Any], name: str, why: str, machine: str) -> Measured:
    """A kept result, with the traces that were written beside it."""
    commit = (record.get("commit") or "unknown")[:7] + " and changes" * bool(record.get("modified"))
    origin = f"{why}`{record['command']}` measured this on {machine} on {record['date'][:10]}, at commit {commit}."
    tables = [MeasuredTable(each["title"], each["columns"], each["rows"]) for each in record["tables"]]
    beginning = f"trace-{name}-"
    files = {path.stem.removeprefix(beginning): path for path in sorted(RESULTS.glob(f"{beginning}*.json"))}
    return Measured(name, origin, False, tables, {trace: Trace.load(path) for trace, path in files.items()})


def _chip(record: dict[str, Any]) -> str:
    return str(record["hardware"].get("gpu") or record["hardware"]["cpu"])


def _display(shown: Measured) -> None:
    try:
        from IPython.display import display
    except ImportError:  # not in a notebook
        print(shown)
    else:
        display(shown)


def _listed(tables: Iterable[MeasuredTable]) -> str:
    return ", ".join(repr(each.title) for each in tables)


def _three_digits(number: float) -> str:
    """Three significant digits, or all that stand before the point: a median deserves no more."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:#.3g}".rstrip(".")
