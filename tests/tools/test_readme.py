"""The tables of the README."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from minisgl.book import architecture
from tools.readme import chapter_list, feature_problems, main, render

ROOT = Path(__file__).parents[2]
HERE = "tests/tools/test_readme.py"
TABLE = "<!-- features:begin -->\n| | minisgl | proved by |\n|---|---|---|\n{}<!-- features:end -->\n"


def test_every_feature_of_this_readme_is_proved() -> None:
    assert feature_problems((ROOT / "README.md").read_text(encoding="utf-8"), ROOT) == []


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        (f"| speed | yes | `{HERE}::test_of_speed` |\n", f"{HERE} has no test_of_speed"),
        ("| speed | yes | `tests/test_nowhere.py::test_of_speed` |\n", "there is no tests/test_nowhere.py"),
        (f"| speed | `{HERE}::test_a_feature_without_a_proof_is_told` | – |\n", "the feature 'speed' names no test"),
    ],
)
def test_a_feature_without_a_proof_is_told(row: str, problem: str) -> None:
    good = f"| truth | yes | `{HERE}::test_a_feature_without_a_proof_is_told` |\n"
    assert feature_problems(TABLE.format(good), ROOT) == []
    assert feature_problems(TABLE.format(good + row), ROOT) == [problem]


def test_the_table_must_be_there() -> None:
    assert feature_problems("# minisgl", ROOT) == ["there is no table of features"]


def test_the_readme_its_picture_and_its_tables_are_as_they_are_generated() -> None:
    assert main(["--check"]) == 0


def test_a_server_of_ours_has_its_range_and_another_its_run(tmp_path: Path) -> None:
    def put(name: str, **record: Any) -> None:
        path = tmp_path / "benchmarks" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        about = {"hardware": {"gpu": "chip", "driver": "1"}, "versions": {"torch": "2"}, "date": "2026-11-28T10:00"}
        path.write_text(json.dumps({**about, "command": "bench --output x", "modified": False, **record}))

    every = dict.fromkeys(("mixed", "bs1", "prefix", "refill", "refill-32", "ttft"), "work")
    speeds = {"tables": [{"rows": []}], "settings": {"workloads": every}}
    put("results/offline.json", **speeds, modified=True)
    put("results/refill.json", **speeds)
    tables = [
        {"columns": ["load", "output tokens/s"], "rows": [["2 users", 1500.0], ["2 users", 1700.0]]},
        {
            "columns": ["load", "TPOT p50", "TTFT p50", "TTFT p99"],
            "rows": [["2 users", 1.0, 2, 3], ["2 users", 1.5, 2, 4]],
        },
        {"columns": ["process", "MiB"], "rows": [["serve", 1]]},
    ]
    put("results/serve-h200.json", tables=tables)
    columns = ["engine", "streams", "output tokens/s", "TPOT, ms", "TTFT p50, ms", "TTFT p99, ms"]
    other = {"columns": columns, "rows": [["other", 2, 1234, 1.1, 5, 6]], "settings": "alone", "date": "today"}
    put("reference/h200.json", engines=[], served=other)
    shown = render(tmp_path)
    assert (
        "| **minisgl** | 2 | **1,500–1,700** | **1.00–1.50** | **2.00** | **3.00–4.00** |\n| other | 2 | 1,234 |"
        in shown
    )
    assert shown.count("from a tree with changes that were not committed") == 1


def test_the_committed_picture_is_the_one_that_the_book_draws() -> None:
    assert (ROOT / "chapters/images/architecture.svg").read_text(encoding="utf-8") == architecture().svg + "\n"


def test_the_list_of_chapters_names_files_that_are_there() -> None:
    listed = chapter_list(ROOT)
    links = re.findall(r"\]\(([^)]+)\)", listed)
    assert len(links) > 35
    assert [link for link in links if not (ROOT / link).is_file()] == []
    assert "| [0 The life of a token](chapters/00-the-life-of-a-token.md) |" in listed
