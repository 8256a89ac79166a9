"""Keeps README.md true: its speeds come from benchmarks/results, its list of chapters from the course, its scoreboard
and its picture from the code that draws them, and each of its features names a test.

``python -m tools.readme`` rewrites them; with ``--check`` it fails if they differ from that. Either fails if a feature
names no test, or one that is not there.
"""

from __future__ import annotations

import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from minisgl.book import architecture, scoreboard
from minisgl.book.course_table import load_table
from tools.links import missing

ROOT = Path(__file__).parent.parent
_PICTURE = "chapters/images/architecture.svg"
_SECTION = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)
_CHAPTERS = re.compile(r"(<!-- chapters:begin -->\n).*?(<!-- chapters:end -->)", re.DOTALL)
_SCOREBOARD = re.compile(r"(<!-- scoreboard:begin -->\n).*?(<!-- scoreboard:end -->)", re.DOTALL)
_FEATURES = re.compile(r"<!-- features:begin -->\n[^\n]*\n[^\n]*\n(?P<rows>.*?)<!-- features:end -->", re.DOTALL)
_LISTED = re.compile(r"\[(?P<title>[^\]]+)\]\((?P<name>\d\d-[\w-]+)\.md\)")
_ROMAN = ("I", "II", "III", "IV", "V")
_READING = 1.5
"""Hours that a chapter takes without its tasks, of which each takes half an hour more."""
_SPEEDS = {"offline": ("mixed", "bs1", "prefix"), "refill": ("refill", "refill-32", "ttft")}
"""Result files, with the workloads of each that are shown."""
_TEST = re.compile(r"`tests/[\w/.]+::\w+`")


def render(root: Path) -> str:
    """The tables in Markdown: requests that start all at once, servers that refill, and servers over HTTP."""
    reference = json.loads((root / "benchmarks" / "reference" / "h200.json").read_text(encoding="utf-8"))
    parts = []
    for name, workloads in _SPEEDS.items():
        ours = _result(root, name)
        parts.append(f"{_table(ours, reference['engines'], workloads)}\n\n{_origin(ours, workloads)}\n")
    return "\n".join([*parts, _served(_result(root, "serve-h200"), reference["served"])])


def _result(root: Path, name: str) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((root / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8"))
    return record


def _served(ours: dict[str, Any], others: dict[str, Any]) -> str:
    """Servers over HTTP in a closed loop: of this engine the least and the most of its runs with so many streams."""
    columns = ["output tokens/s", "TPOT p50", "TTFT p50", "TTFT p99"]
    values: defaultdict[tuple[str, str], list[float]] = defaultdict(list)  # of the runs, by load and column
    for table in ours["tables"]:
        for load, *row in table["rows"] if table["columns"][0] == "load" else ():
            for column, value in zip(table["columns"][1:], row, strict=True):
                values[load, column].append(value)
    lines = [f"| {' | '.join(others['columns'])} |", "|---|" + "---:|" * (len(others["columns"]) - 1)]
    for load in dict.fromkeys(load for load, _ in values):
        ends = [(min(runs), max(runs)) for runs in (values[load, column] for column in columns)]
        cells = [f"**{'–'.join(dict.fromkeys(map(_shown, pair)))}**" for pair in ends]
        streams = load.split()[0]
        lines.append(f"| **minisgl** | {streams} | {' | '.join(cells)} |")
        lines += [f"| {' | '.join(map(_cell, row))} |" for row in others["rows"] if str(row[1]) == streams]
    hardware = ours["hardware"]
    return (
        "\n".join(lines)
        + f"\n\nServed over HTTP on one {hardware['gpu']}, Qwen3-0.6B's shape, 512 tokens in and 256 out in a "
        f"closed loop; the least and the most of several runs, measured on {ours['date'][:10]}{_with_changes(ours)} by "
        f"`{ours['command'].split(' --output ')[0]}` and the like. The other engine: {others['settings']}, on "
        f"{others['date']}.\n"
    )


def _cell(value: str | float) -> str:
    return f"{value:,}" if isinstance(value, (int, float)) else value


def _with_changes(record: dict[str, Any]) -> str:
    """A warning about a result whose working tree was not that of its commit."""
    return ", from a tree with changes that were not committed," if record["modified"] else ""


def _table(ours: dict[str, Any], others: list[dict[str, Any]], workloads: Sequence[str]) -> str:
    """The least and the most of this engine's runs beside those of the others that ran one of the workloads."""
    measured: dict[tuple[str, str], tuple[str, str]] = {}
    for model, workload, _, *ends, unit in ours["tables"][0]["rows"]:
        if workload in workloads:
            measured[model, workload] = ("–".join(dict.fromkeys(map(_shown, ends))), unit)
    columns = list(measured)
    lines = [
        f"| | {' | '.join(f'{model} `{workload}`, {measured[model, workload][1]}' for model, workload in columns)} |",
        f"|---|{'---:|' * len(columns)}",
        f"| **minisgl** | {' | '.join(f'**{measured[column][0]}**' for column in columns)} |",
    ]
    for engine in others:
        cells = [engine["results"].get(model, {}).get(workload, "–") for model, workload in columns]
        if any(cell != "–" for cell in cells):
            lines.append(f"| {engine['name']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _origin(record: dict[str, Any], names: Sequence[str]) -> str:
    hardware, versions = record["hardware"], record["versions"]
    about = record["settings"]["workloads"]
    workloads = "; ".join(f"`{name}`: {about[name]}" for name in names)
    return (
        f"The least and the most of several runs on one {hardware['gpu']} (driver {hardware['driver']}, torch "
        f"{versions['torch']}), bfloat16, random weights in the shapes of the checkpoints, measured on "
        f"{record['date'][:10]}{_with_changes(record)} by `{record['command']}`. {workloads}. The other engines ran "
        "the same workloads on the same kind of machine on the date in `benchmarks/reference/h200.json`."
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def chapter_list(root: Path) -> str:
    """The chapters with their notebooks, hours and tasks, as they are in SUMMARY.md and in the course's table."""
    tasks = {number: len(chapter.tasks) for number, chapter in load_table().chapters.items()}
    lines = ["| chapter | notebook | hours | tasks |", "|---|---|---:|---:|"]
    part = 0
    for line in (root / "chapters" / "SUMMARY.md").read_text(encoding="utf-8").splitlines()[1:]:
        if line.startswith("# "):
            part += 1
            lines.append(f"| **[{_ROMAN[part - 1]} {line[2:]}](chapters/part-{part}.md)** | | | |")
        elif found := _LISTED.search(line):
            number = int(found["name"][:2])
            count = tasks.get(number, 0)
            links = (
                f"[{number} {found['title']}](chapters/{found['name']}.md) | [open](notebooks/{found['name']}.ipynb)"
            )
            lines.append(f"| {links} | {_READING + count / 2:g} | {count or '–'} |")
    return "\n".join(lines) + "\n"


def feature_problems(text: str, root: Path) -> list[str]:
    """Which rows of the table of features are not proved, in sentences.

    Args:
        text: of the README.
        root: of the repository, which has the tests.
    """
    table = _FEATURES.search(text)
    if table is None:
        return ["there is no table of features"]
    rows = table["rows"].splitlines()
    unproved = [row.split("|")[1].strip() for row in rows if not _TEST.search(row.rstrip(" |").rpartition("|")[2])]
    return [f"the feature {name!r} names no test" for name in unproved] + [*missing(table["rows"], root)]


def _is_stale() -> bool:
    """Whether the picture of the engine is not as `minisgl.book.architecture` draws it now."""
    path = ROOT / _PICTURE
    return not path.is_file() or path.read_text(encoding="utf-8") != architecture().svg + "\n"


def main(arguments: list[str]) -> int:
    """Rewrite or check the README; returns the exit status."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    problems = feature_problems(text, ROOT)
    for problem in problems:
        print(f"README.md: {problem}", file=sys.stderr)
    updated = _SECTION.sub(lambda match: match[1] + render(ROOT) + match[2], text)
    updated = _CHAPTERS.sub(lambda match: match[1] + chapter_list(ROOT) + match[2], updated)
    board = scoreboard(max(load_table().chapters)).text
    updated = _SCOREBOARD.sub(lambda match: f"{match[1]}{board}\n{match[2]}", updated)
    if "--check" in arguments:
        stale = [name for name, now in (("README.md", updated != text), (_PICTURE, _is_stale())) if now]
        for name in stale:
            print(f"{name} is not as it is generated: run python -m tools.readme", file=sys.stderr)
        return int(bool(stale or problems))
    path.write_text(updated, encoding="utf-8")
    (ROOT / _PICTURE).write_text(architecture().svg + "\n", encoding="utf-8")
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
