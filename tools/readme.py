"""Renders the table of README.md from the results in benchmarks/results, so that it cannot say anything else.

``python -m tools.readme`` rewrites it; with ``--check`` it fails if the table differs from the results.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_SECTION = re.compile(r"(<!-- results:begin -->\n).*?(<!-- results:end -->)", re.DOTALL)


def render(root: Path) -> str:
    """The tables in Markdown: this engine's medians beside what the others were measured to do."""
    ours = json.loads((root / "benchmarks" / "results" / "offline.json").read_text(encoding="utf-8"))
    others = json.loads((root / "benchmarks" / "reference" / "h200.json").read_text(encoding="utf-8"))
    measured: dict[tuple[str, str], tuple[str, str]] = {}
    for model, workload, median, *_, unit in ours["tables"][0]["rows"]:
        measured[model, workload] = (_shown(median), unit)
    columns = list(measured)
    lines = [
        f"| | {' | '.join(f'{model} `{workload}`, {measured[model, workload][1]}' for model, workload in columns)} |",
        f"|---|{'---:|' * len(columns)}",
        f"| **minisgl** | {' | '.join(f'**{measured[column][0]}**' for column in columns)} |",
    ]
    for engine in others["engines"]:
        cells = [engine["results"].get(model, {}).get(workload, "–") for model, workload in columns]
        lines.append(f"| {engine['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{_origin(ours)}\n"


def _origin(record: dict[str, Any]) -> str:
    hardware, versions = record["hardware"], record["versions"]
    workloads = "; ".join(f"`{name}`: {summary}" for name, summary in record["settings"]["workloads"].items())
    return (
        f"Medians on one {hardware['gpu']} (driver {hardware['driver']}, torch {versions['torch']}), bfloat16, random "
        f"weights in the shapes of the checkpoints, measured on {record['date'][:10]} by `{record['command']}`. "
        f"{workloads}. The other engines ran the same workloads on the same kind of machine on "
        f"the date in `benchmarks/reference/h200.json`."
    )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


def main(arguments: list[str]) -> int:
    """Rewrite or check the README; returns the exit status."""
    path = ROOT / "README.md"
    text = path.read_text(encoding="utf-8")
    updated = _SECTION.sub(lambda match: match[1] + render(ROOT) + match[2], text)
    if "--check" in arguments:
        if updated != text:
            print("README.md differs from benchmarks/results: run python -m tools.readme", file=sys.stderr)
        return int(updated != text)
    path.write_text(updated, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
