"""Numbers of a GPU in a book that half of its readers run without one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import minisgl
from minisgl.errors import ConfigError
from minisgl.viz.markdown import table

if TYPE_CHECKING:
    from minisgl.bench.report import Report

RESULTS = Path(minisgl.__file__).parent.parent / "benchmarks" / "results"
"""Of the checkout that Python runs."""

Cell = str | int | float


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
        return f"**{self.title}**\n\n{table(self.columns, self.rows, shown=_three_digits).text}"


@dataclass(frozen=True, slots=True)
class Measured:
    """Tables of a benchmark, run here or recorded elsewhere. What shows them says which.

    Args:
        name: the benchmark's.
        origin: a sentence: where the numbers come from, and why from there.
        live: True if they were measured here and now.
        tables: the results.
    """

    name: str
    origin: str
    live: bool
    tables: Sequence[MeasuredTable]

    def show(self, title_part: str | None = None) -> None:
        """Display the tables whose title has this part, or all, below the sentence on their origin."""
        shown = Measured(self.name, self.origin, self.live, self._find(title_part))
        try:
            from IPython.display import display
        except ImportError:  # not in a notebook
            print(shown)
        else:
            display(shown)

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
    if torch.cuda.is_available() and torch.cuda.device_count() >= gpus:
        origin = f"Measured just now, on this machine's {torch.cuda.get_device_name()}."
        tables = [MeasuredTable(each.title, each.columns, each.rows) for each in run().tables]
        return Measured(name, origin, True, tables)
    return _kept(name, gpus)


def _kept(name: str, gpus: int) -> Measured:
    path = RESULTS / f"{name}.json"
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(
            f"measured: {_too_few(gpus)} here, and no benchmarks/results/{name}.json beside the package to show "
            "instead. Run from a checkout (`pip install -e .`), or measure on a machine with as many GPUs"
        ) from error
    tables = [MeasuredTable(each["title"], each["columns"], each["rows"]) for each in record["tables"]]
    return Measured(name, _origin(record, gpus), False, tables)


def _too_few(gpus: int) -> str:
    return "no CUDA device" if gpus == 1 else f"fewer than {gpus} CUDA devices"


def _origin(record: dict[str, Any], gpus: int) -> str:
    hardware, few = record["hardware"], _too_few(gpus)
    commit = (record.get("commit") or "unknown")[:7] + " and changes" * bool(record.get("modified"))
    return (
        f"{few[0].upper()}{few[1:]} here: `{record['command']}` measured this on "
        f"{'one' if gpus == 1 else gpus} {hardware.get('gpu') or hardware['cpu']} on {record['date'][:10]}, at commit "
        f"{commit}."
    )


def _listed(tables: Iterable[MeasuredTable]) -> str:
    return ", ".join(repr(each.title) for each in tables)


def _three_digits(number: float) -> str:
    """Three significant digits, or all that stand before the point: a median deserves no more."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:#.3g}".rstrip(".")
