"""What a report says of its targets, and what it writes down."""

from __future__ import annotations

import json
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from minisgl.bench.report import Report, Table, Target


@pytest.mark.parametrize(
    ("value", "limit", "at_least", "verdict"),
    [
        (1.5, 1.5, True, "met"),
        (1.2, 1.5, True, "missed by 20.0%"),
        (0.2, 0.2, False, "met"),
        (0.25, 0.2, False, "missed by 25.0%"),
    ],
)
def test_a_target_is_met_or_missed_by_a_share_of_its_limit(
    value: float, limit: float, at_least: bool, verdict: str
) -> None:
    assert Target("speed", value, limit, at_least).verdict == verdict


def test_the_file_says_what_ran_where_and_how_it_went(tmp_path: Path) -> None:
    table = Table("sizes", ["name", "bytes"], [["page", 4096.0]])
    report = Report("toy", {"repeat": 2}, [table], [Target("bytes", 3.0, 4.0, at_least=True)], {"seconds": [1.0, 2.0]})
    path = tmp_path / "results" / "toy.json"
    report.write(path, "python -m toy", load_average=0.5)

    record = json.loads(path.read_text(encoding="utf-8"))
    assert record["command"] == "python -m toy"
    assert record["settings"] == {"repeat": 2}
    assert record["samples"] == {"seconds": [1.0, 2.0]}
    assert record["tables"] == [{"title": "sizes", "columns": ["name", "bytes"], "rows": [["page", 4096.0]]}]
    assert record["targets"] == [
        {"name": "bytes", "value": 3.0, "aim": "at least 4.00", "met": False, "verdict": "missed by 25.0%"}
    ]
    assert {"cpu", "cores", "threads", "memory_bytes", "system", "load_average_before"} <= set(record["hardware"])
    assert {"python", "torch", "transformers", "numpy"} <= set(record["versions"])
    assert {"date", "commit", "modified"} <= set(record)


def test_the_screen_shows_tables_and_verdicts_in_eighty_columns() -> None:
    table = Table("sizes", ["name", "bytes"], [["page", 12345.6], ["ratio", 1.234]])
    console = Console(width=80, record=True, file=StringIO())
    Report("toy", {}, [table], [Target("bytes", 3.0, 4.0, at_least=True)]).show(console)
    text = console.export_text()
    assert "12,346" in text
    assert "1.23" in text
    assert "missed by 25.0%" in text
    assert max(map(len, text.splitlines())) <= 80
