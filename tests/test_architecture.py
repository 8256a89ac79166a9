"""ARCHITECTURE.md: its files exist, its reading path is an evening long, and its layers are those that lint holds."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")


def reading_path() -> list[Path]:
    return [ROOT / name for name in re.findall(r"^\| \d+ \| `([^`]+)` \|", TEXT, re.MULTILINE)]


def test_every_file_that_is_named_exists() -> None:
    named = re.findall(r"`(minisgl/[\w/.]+)`", TEXT) + re.findall(r"\]\(([\w/.]+)\)", TEXT)
    assert len(named) > 15
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_the_reading_path_is_at_most_twelve_files_and_2500_lines() -> None:
    files = reading_path()
    lines = {file.name: len(file.read_text(encoding="utf-8").splitlines()) for file in files}
    assert len(set(files)) == len(files) == 11
    assert sum(lines.values()) <= 2500, lines


def test_every_name_of_code_is_there() -> None:
    """Classes and functions that the page names are defined in the package."""
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / "minisgl").rglob("*.py")))
    told = re.findall(r"`([A-Za-z_.]+(?:\(\))?)`", TEXT)
    names = {name.split(".")[-1].rstrip("()") for name in told if not name.startswith("minisgl.")}
    names -= {"ContextVar", "introduces", "n"}  # Python's, a field of the table, a parameter of a request
    assert {"EngineCore", "KVMemory", "generate", "schedule"} <= names
    assert [name for name in sorted(names) if not re.search(rf"^ *(class|def) {name}\b", source, re.MULTILINE)] == []


def test_layers_are_those_of_the_import_contract() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    contract = [set(re.findall(r"[\w.]+", layer)) for layer in tools["importlinter"]["contracts"][0]["layers"]]
    section = TEXT[TEXT.index("## The layers") :]
    rows = re.findall(r"^\| (`minisgl.*?) \|", section, re.MULTILINE)
    told = [set(re.findall(r"`([\w.]+)`", row)) for row in rows]
    assert len(told) == len(contract)
    for names, layer in zip(told, contract, strict=True):
        assert names <= layer, f"{names - layer} are of another layer"
