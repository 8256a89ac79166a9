"""What every benchmark returns: tables, targets met or missed, and where the numbers come from."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from minisgl.kvcache.sizing import total_memory
from minisgl.trace import Trace

Cell = str | int | float


@dataclass(frozen=True, slots=True)
class Table:
    """A table of results: headings with units, and one cell a column; the first cell names the row."""

    title: str
    columns: Sequence[str]
    rows: list[list[Cell]] = field(default_factory=list)

    def add(self, *cells: Cell) -> None:
        """Append a row."""
        self.rows.append([*cells])


class Target(NamedTuple):
    """A goal that was set before measuring; ``value`` and ``limit`` have the same unit."""

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
        return f"{'at least' if self.at_least else 'at most'} {_format(self.limit)}"


@dataclass(slots=True)
class Report:
    """The outcome of one benchmark, which fills it in."""

    benchmark: str  # its name
    settings: dict[str, Any] = field(default_factory=dict)  # what is needed to run it again, beside the options
    tables: list[Table] = field(default_factory=list)  # results and goals
    targets: list[Target] = field(default_factory=list)
    samples: dict[str, list[float]] = field(default_factory=dict)  # the single measurements behind the medians, by name
    traces: dict[str, Trace] = field(default_factory=dict)  # of some of the steps, by name

    def table(self, title: str, *columns: str) -> Table:
        """Add an empty table."""
        self.tables.append(Table(title, columns))
        return self.tables[-1]

    def target(self, name: str, value: float, limit: float, at_least: bool) -> None:
        """Add a goal, met or missed."""
        self.targets.append(Target(name, value, limit, at_least))

    def show(self, console: Console) -> None:
        """Print the tables, and the targets as the last of them."""
        rows: list[list[Cell]] = [[each.name, each.value, each.aim, each.verdict] for each in self.targets]
        for table in [*self.tables, Table("targets", ["", "measured", "target", ""], rows)]:
            drawn = RichTable(title=table.title, title_justify="left", box=box.SIMPLE_HEAD)
            for index, column in enumerate(table.columns):
                drawn.add_column(column, justify="left" if index == 0 else "right")
            for row in table.rows:
                drawn.add_row(*map(_format, row))
            console.print()
            console.print(drawn)

    def write(self, path: Path, command: str, load_average: float) -> None:
        """Write everything as JSON, with the command that was typed, the load average of the machine before it ran,
        machine, versions, date and commit. The trace ``on`` of ``overlap.json`` goes to ``trace-overlap-on.json``."""
        git = ("git", "-C", str(Path(__file__).parent.parent))
        status = _output_of(*git, "status", "--porcelain", "--", ".")
        about = {
            "benchmark": self.benchmark,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": command,
            "commit": _output_of(*git, "rev-parse", "HEAD"),
            "modified": None if status is None else bool(status),
            "hardware": {**_hardware(), "load_average_before": round(load_average, 2)},
            "versions": _versions(),
        }
        target_fields = ("name", "value", "aim", "met", "verdict")
        record = {
            **about,
            "settings": self.settings,
            "tables": [asdict(table) for table in self.tables],
            "targets": [{name: getattr(each, name) for name in target_fields} for each in self.targets],
            "samples": self.samples,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1, ensure_ascii=False, default=str) + "\n", encoding="utf-8")
        for name, trace in self.traces.items():
            trace.export(path.with_name(f"trace-{path.stem}-{name}.json"), about)


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, least and most."""
    return statistics.median(values), min(values), max(values)


def _format(cell: Cell) -> str:
    """Write floats with three significant digits, or all digits before the point."""
    if not isinstance(cell, float):
        return str(cell)
    return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:#.3g}".rstrip(".")


def _output_of(*command: str) -> str | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def _hardware() -> dict[str, Any]:
    """CPU (as Linux names it) and memory, and the first CUDA device if there is one."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    hardware = {
        "cpu": next(names, platform.processor() or platform.machine()),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": total_memory(torch.device("cpu")),
        "system": platform.platform(),
    }
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        driver = _output_of("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0")
        hardware |= {"gpu": gpu.name, "gpu_memory_bytes": gpu.total_memory, "driver": driver or "unknown"}
    return hardware


def _versions() -> dict[str, str]:
    packages = ["minisgl", "torch", "transformers", "numpy"]
    versions = {"python": platform.python_version()}
    if torch.cuda.is_available():
        packages += ["triton", "flashinfer-python"]
        versions["cuda"] = str(torch.version.cuda)
    for package in packages:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:  # run from a source tree; the commit tells which
            versions[package] = "not installed"
    return versions
