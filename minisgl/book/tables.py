"""Tables in Markdown, and the results of benchmarks: measured on this machine, or kept in ``benchmarks/results``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import minisgl
from minisgl.bench.report import Cell, Report, Table
from minisgl.errors import ConfigError, NotEnoughMemory
from minisgl.trace import Trace

RESULTS = Path(minisgl.__file__).parent.parent / "benchmarks" / "results"  # of the checkout that Python runs

_NUMBER = re.compile(r"[+−-]?\d[\d,]*(\.\d+)?(e[+-]?\d+)?( ?%)?")
_CODE = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
# An option of a command is shown as code, or a page would make a dash of its two hyphens.
_OPTION = re.compile(r"(?<!\S)(--[a-z-]+)")


@dataclass(frozen=True, slots=True)
class Markdown:
    """Text that a notebook renders as Markdown, and that is shown as it is written elsewhere."""

    text: str

    def __repr__(self) -> str:
        return self.text

    def _repr_markdown_(self) -> str:
        return self.text


class WithCode(Markdown):
    """Markdown whose blocks of code get a fixed width around them: nbconvert gives them none in an output."""

    def _repr_markdown_(self) -> str:
        return _CODE.sub(r'<div style="font-family:monospace; margin-bottom:1em">\n\n\g<0>\n\n</div>', self.text)


def table(
    headers: Sequence[str], rows: Iterable[Sequence[object]], shown: Callable[[float], str] = "{:.2f}".format
) -> Markdown:
    """A table; columns of numbers are aligned to the right, also where some are missing or come as text.

    A row has one value a column. ``shown`` writes a floating-point number; by default with two decimals.
    """
    body = [[_cell(value, shown) for value in row] for row in rows]
    columns = zip(*body, strict=True) if body else [()] * len(headers)
    rule = ["---:" if _is_numeric(column) else "---" for column in columns]
    return Markdown("\n".join(f"| {' | '.join(line)} |" for line in [list(headers), rule, *body]))


def _is_numeric(column: Iterable[str]) -> bool:
    cells = set(column) - {"", "–"}
    return len(cells) > 0 and all(map(_NUMBER.fullmatch, cells))


def _cell(value: object, shown: Callable[[float], str]) -> str:
    text = shown(value) if isinstance(value, float) else str(value)
    return text.replace("|", "\\|").replace("\n", " ")


@dataclass(frozen=True, slots=True)
class Measured:
    """Tables of a benchmark."""

    name: str
    origin: str  # a sentence: where the numbers come from, and why from there
    live: bool  # True if they were measured here and now
    tables: Sequence[Table]
    traces: Mapping[str, Trace] = field(default_factory=dict)  # of some of the steps, by name

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

    def _find(self, title_part: str | None) -> list[Table]:
        found = [each for each in self.tables if title_part is None or title_part in each.title]
        if not found:
            raise ConfigError(f"no title of {self.name!r} has the part {title_part!r}: {_listed(self.tables)}")
        return found

    def __str__(self) -> str:
        """The sentence on their origin, to print."""
        return self.origin.replace("`", "")

    def __repr__(self) -> str:
        return "\n\n".join([f"*{self.origin}*", *map(_in_markdown, self.tables)])

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, str], dict[str, Any]]:
        """The display, and the mark by which `tools.notebooks` counts results that were not measured there."""
        text = repr(self)
        mark = {"name": self.name, "live": self.live, "origin": self.origin}
        return {"text/markdown": text, "text/plain": text}, {"minisgl.measured": mark}


def measured(name: str, run: Callable[[], Report], gpus: int = 1) -> Measured:
    """Measure on as many GPUs of this machine, or read the kept result ``name``.json where they are too few or small.

    Raises `ConfigError` if this machine cannot measure it, and there is no kept result.
    """
    missing = _too_few(gpus)
    if not missing:
        try:
            report = run()
        except (torch.OutOfMemoryError, NotEnoughMemory):
            missing = f"Not enough memory on this machine's {torch.cuda.get_device_name()}"
    if missing:
        record = _read(name)
        return _kept(record, name, missing, f"one {_chip(record)}" if gpus == 1 else f"{gpus} {_chip(record)}s")
    origin = f"Measured just now, on this machine's {torch.cuda.get_device_name()}."
    return Measured(name, origin, True, report.tables, report.traces)


def kept(name: str) -> Measured:
    """Read a result of ``benchmarks/results``, on every machine: it takes longer than a notebook may.

    Raises `ConfigError` if there is none.
    """
    record = _read(name)
    hardware = record["hardware"]
    load = f", load average {hardware[key]} before" if (key := "load_average_before") in hardware else ""
    return _kept(record, name, "Kept", f"{_chip(record)} ({hardware['cores']} cores{load})")


def has_cuda(instead: str) -> bool:
    """Whether there is a CUDA device; if not, print so with ``instead``, such as ``"nothing is captured"``."""
    if missing := _too_few(1):
        print(f"{missing}: {instead}.")
    return not missing


def _too_few(gpus: int) -> str:
    """Whether this machine has fewer CUDA devices, in words."""
    if torch.cuda.is_available() and torch.cuda.device_count() >= gpus:
        return ""
    return "No CUDA device here" if gpus == 1 else f"Fewer than {gpus} CUDA devices here"


def _read(name: str) -> dict[str, Any]:
    try:
        return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")))
    except FileNotFoundError as error:
        raise ConfigError(
            f"{name}: nothing is measured here, and there is no benchmarks/results/{name}.json beside the package to "
            "show instead. Run from a checkout (`pip install -e .`), or what takes GPUs on a machine with as many GPUs"
        ) from error


def _kept(record: dict[str, Any], name: str, why: str, machine: str) -> Measured:
    """A kept result, with the traces that were written beside it."""
    commit = (record.get("commit") or "unknown")[:7] + " and changes" * bool(record.get("modified"))
    origin = f"{why}: `{record['command']}` measured this on {machine} on {record['date'][:10]}, at commit {commit}."
    tables = [Table(each["title"], each["columns"], each["rows"]) for each in record["tables"]]
    prefix = f"trace-{name}-"
    traces = {path.stem.removeprefix(prefix): Trace.load(path) for path in sorted(RESULTS.glob(f"{prefix}*.json"))}
    return Measured(name, origin, False, tables, traces)


def _chip(record: dict[str, Any]) -> str:
    return str(record["hardware"].get("gpu") or record["hardware"]["cpu"])


def _display(shown: Measured) -> None:
    try:
        from IPython.display import display
    except ImportError:  # not in a notebook
        print(shown)
    else:
        display(shown)


def _in_markdown(shown: Table) -> str:
    rows = [[_OPTION.sub(r"`\1`", cell) if isinstance(cell, str) else cell for cell in row] for row in shown.rows]
    return f"**{shown.title}**\n\n{table(shown.columns, rows, shown=three_digits).text}"


def _listed(tables: Iterable[Table]) -> str:
    return ", ".join(repr(each.title) for each in tables)


def three_digits(number: float) -> str:
    """Three significant digits, or all that stand before the point: a median deserves no more."""
    return f"{number:,.0f}" if abs(number) >= 100 else f"{number:#.3g}".rstrip(".")
