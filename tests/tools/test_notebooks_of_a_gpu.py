"""The notebooks in ``benchmarks/notebooks-h200``: whole, from one machine, and measured there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "notebooks-h200"
PATHS = sorted(FOLDER.glob("*.ipynb"))


def code_cells(path: Path) -> list[Any]:
    notebook = nbformat.read(path, as_version=4)
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def results(path: Path) -> list[dict[str, Any]]:
    """What `minisgl.book.Measured` says of each display: its name, whether it was measured there, and its origin."""
    outputs = [output for cell in code_cells(path) for output in cell.outputs]
    return [mark for output in outputs if (mark := output.get("metadata", {}).get("minisgl.measured"))]


def test_every_chapter_has_one() -> None:
    assert [path.stem for path in PATHS] == sorted(path.stem for path in (ROOT / "chapters").glob("[0-9][0-9]-*.md"))


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem[:2])
def test_every_cell_was_run_once_in_order_without_an_error(path: Path) -> None:
    cells = code_cells(path)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    outputs = [output for cell in cells for output in cell.outputs]
    assert outputs
    assert [output for output in outputs if output.output_type == "error" or output.get("name") == "stderr"] == []


def test_what_two_cards_can_measure_was_measured_on_them() -> None:
    """Kept results are those that no notebook measures anywhere, and the one that wants four cards."""
    found = [mark for path in PATHS for mark in results(path)]
    live = {mark["name"] for mark in found if mark["live"]}
    assert live == {"attention", "attention-steps", "batch-one", "kernels", "overlap", "preemption", "tp"}
    assert all("NVIDIA H200" in mark["origin"] for mark in found if mark["live"])
    others = {mark["name"]: mark["origin"] for mark in found if not mark["live"]}
    assert others.pop("all-reduce").startswith("Fewer than 4 CUDA devices here")
    assert all(origin.startswith("Kept: ") for origin in others.values())
