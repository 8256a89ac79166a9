"""What every benchmark hands back: tables, targets met or missed, and where the numbers come from."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from minisgl.kvcache.sizing import total_memory
from minisgl.trace import Trace

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """A table of results, the same on the screen and in the file.

    Args:
        title: what is measured.
        columns: headings, units included.
        rows: one cell a column; the first names the row.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Target:
    """A number that was set before measuring.

    Args:
        name: what it is about.
        value: what was measured.
        limit: what was aimed at, in the same unit.
        at_least: True if more is better.
    """

    name: str
    value: float
    limit: float
    at_least: bool

    @property
    def met(self) -> bool:
        return self.value >= self.limit if self.at_least else self.value <= self.limit

    @property
    def verdict(self) -> str:
        """``met``, or by which share of the limit it was missed."""
        return "met" if self.met else f"missed by {abs(self.value - self.limit) / self.limit:.1%}"

    @property
    def aim(self) -> str:
        """The limit in words."""
        return f"{'at least' if self.at_least else 'at most'} {_shown(self.limit)}"


@dataclass(frozen=True, slots=True)
class Report:
    """The outcome of one benchmark.

    Args:
        benchmark: its name.
        settings: what was run, so that somebody else can run it again.
        tables: results.
        targets: goals.
        samples: the single measurements behind the medians, by name, where they are few.
        traces: of some of the steps, by name.
    """

    benchmark: str
    settings: dict[str, Any]
    tables: Sequence[Table]
    targets: Sequence[Target]
    samples: dict[str, list[float]] = field(default_factory=dict)
    traces: Mapping[str, Trace] = field(default_factory=dict)

    def show(self, console: Console) -> None:
        """Print the tables, and the targets as the last of them."""
        targets = [[target.name, _shown(target.value), target.aim, target.verdict] for target in self.targets]
        for table in [*self.tables, Table("targets", ["", "measured", "target", ""], targets)]:
            console.print()
            console.print(_drawn(table))

    def write(self, path: Path, command: str, load_average: float) -> None:
        """Write everything as JSON, together with machine, versions, date and commit, and each trace beside it.

        Args:
            path: of the file, such as ``overlap.json``; its directory is made if it is missing. The trace ``on`` goes
                to ``trace-overlap-on.json``.
            command: what was typed.
            load_average: processes that wanted to run in the minute before; other people's work makes numbers worse.
        """
        about = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            **_commit(),
            "hardware": {**_hardware(), "load_average_before": round(load_average, 2)},
            "versions": _versions(),
        }
        record = {
            **about,
            "settings": self.settings,
            "tables": [{"title": t.title, "columns": t.columns, "rows": t.rows} for t in self.tables],
            "targets": [
                {"name": t.name, "value": t.value, "aim": t.aim, "met": t.met, "verdict": t.verdict}
                for t in self.targets
            ],
            "samples": self.samples,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        for name, trace in self.traces.items():
            trace.export(path.with_name(f"trace-{path.stem}-{name}.json"), about)


def _drawn(table: Table) -> RichTable:
    drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
    for index, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if index == 0 else "right")
    for row in table.rows:
        drawn.add_row(*(_shown(cell) for cell in row))
    return drawn


def _shown(cell: Cell) -> str:
    """Floats with three significant digits, or all digits before the point."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:#.3g}".rstrip(".")


def _hardware() -> dict[str, Any]:
    return {
        "cpu": _cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory(torch.device("cpu")),
        "system": platform.platform(),
        **_gpu(),
    }


def _gpu() -> dict[str, Any]:
    """The first CUDA device; nothing where there is none."""
    if not torch.cuda.is_available():
        return {}
    properties = torch.cuda.get_device_properties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        driver = "unknown"
    return {"gpu": properties.name, "gpu_memory_bytes": properties.total_memory, "driver": driver}


def _cpu_name() -> str:
    """The model as Linux names it; elsewhere what Python knows."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def _versions() -> dict[str, str]:
    packages = ["minisgl", "torch", "transformers", "numpy"]
    versions = {"python": platform.python_version()}
    if torch.cuda.is_available():
        packages += ["triton", "flashinfer-python"]
        versions["cuda"] = str(torch.version.cuda)
    return versions | {name: _version(name) for name in packages}


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a source tree; the commit tells which
        return "not installed"


def _commit() -> dict[str, Any]:
    """The commit of the source tree, and whether files differ from it; both None outside of a checkout."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(Path(__file__).parent.parent), *arguments]
        try:
            return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            return None

    status = git("status", "--porcelain", "--", ".")
    return {"commit": git("rev-parse", "HEAD"), "modified": None if status is None else bool(status)}
