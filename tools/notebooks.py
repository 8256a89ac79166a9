"""Chapters and their notebooks: generated in one direction, and compared.

``python -m tools.notebooks run [NAME ...]`` executes chapters (all, or those whose names begin so) into notebooks.
``python -m tools.notebooks check`` fails unless every chapter has a notebook with the same cells and sound outputs.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

CHAPTER_FILES = "[0-9][0-9]-*.md"
CELL_TIMEOUT = 900
"""Seconds that one cell may run: the first one fetches the default model, which takes minutes on a slow line."""

_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}
_WIDGET = "application/vnd.jupyter.widget-view+json"
_MACHINE_PATH = re.compile(r"/(home|root|Users|tmp|work)/\S+|\S*site-packages\S*|[A-Z]:\\\\\S+")
_LISTING = re.compile(r"`(?P<path>minisgl/[\w/]+\.py)`, line \d+\n\n```python\n(?P<code>.*)\n```", re.DOTALL)


def read_chapter(path: Path) -> Any:
    """The cells of a chapter as a notebook without outputs. A cell's id is a hash of its text."""
    notebook = jupytext.read(path, fmt="md")
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return notebook


def run(chapter: Path, notebook_path: Path) -> None:
    """Execute a chapter and write its notebook, without times or anything else that differs from run to run.

    A widget lives in the kernel that made it, under an id of chance. What is kept of it are its other forms, such as
    the strip of a `minisgl.viz.player`; the widget appears when a reader runs the cell.
    """
    notebook = read_chapter(chapter)
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(notebook_path.parent)}},
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(_WIDGET, None)
    nbformat.write(notebook, notebook_path)


def check(root: Path) -> list[str]:
    """What is wrong with the pairs below ``root``, in sentences; empty if nothing is."""
    chapters = {path.stem: path for path in sorted((root / "chapters").glob(CHAPTER_FILES))}
    notebooks = {path.stem: path for path in sorted((root / "notebooks").glob("*.ipynb"))}
    problems = [] if chapters else [f"chapters/: no file {CHAPTER_FILES}, so there is nothing to compare"]
    problems += [f"notebooks/{name}.ipynb: no such chapter" for name in notebooks.keys() - chapters.keys()]
    for name, path in chapters.items():
        if name not in notebooks:
            problems.append(f"chapters/{name}.md: no notebook")
            continue
        notebook = nbformat.read(notebooks[name], as_version=4)
        found = _pairing_problems(path, notebook) or _output_problems(notebook, root)
        problems += [f"notebooks/{name}.ipynb: {problem}" for problem in found]
    return problems


def _pairing_problems(chapter: Path, notebook: Any) -> list[str]:
    ours, theirs = read_chapter(chapter), notebook.cells
    text = chapter.read_text()
    if jupytext.writes(ours, fmt="md") != text:
        return [f"saving it in JupyterLab would change {chapter.name}: run `jupytext --to md {chapter}`"]
    for number, (cell, other) in enumerate(zip(ours.cells, theirs, strict=False)):
        if _identity(cell) != _identity(other):
            return [f"cell {number} differs from the chapter: {other.source[:60]!r}"]
    if len(ours.cells) != len(theirs):
        return [f"{len(theirs)} cells, the chapter has {len(ours.cells)}"]
    return []


def _identity(cell: Any) -> tuple[str, str, list[str]]:
    return cell.cell_type, cell.source, cell.metadata.get("tags", [])


def _output_problems(notebook: Any, root: Path) -> list[str]:
    problems: list[str] = []
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        problems.append("not every code cell was executed once, from top to bottom")
    for cell in code:
        where = f"the cell {cell.source[:40]!r}"
        for output in cell.outputs:
            if output.output_type == "error" or output.get("name") == "stderr":
                problems.append(f"{where} ends in an error or writes to stderr")
            if _WIDGET in output.get("data", {}):
                problems.append(f"{where} keeps a widget, which only the kernel that made it can show")
            text = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))
            if path := _MACHINE_PATH.search(text):
                problems.append(f"{where} shows a path of some machine: {path[0]}")
            if not _listing_is_current(output.get("data", {}).get("text/markdown", ""), root):
                problems.append(f"{where} shows source that the package no longer has")
    return problems


def _listing_is_current(text: str, root: Path) -> bool:
    """True for anything that is no listing of `minisgl.viz.show`, and for a listing that is in its file."""
    listing = _LISTING.fullmatch(text)
    if listing is None:
        return True
    path = root / listing["path"]
    lines = [line.strip() for line in path.read_text().splitlines()] if path.is_file() else []
    return "\n".join(line.strip() for line in listing["code"].splitlines()) in "\n".join(lines)


def _run_all(root: Path, names: list[str]) -> int:
    for path in sorted((root / "chapters").glob(CHAPTER_FILES)):
        if not names or path.name.startswith(tuple(names)):
            print(f"executing {path.name}", flush=True)
            try:
                run(path, root / "notebooks" / f"{path.stem}.ipynb")
            except CellExecutionError as error:
                print(error, file=sys.stderr)
                return 1
    return 0


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["run", "check"])
    parser.add_argument("names", nargs="*", help="beginnings of chapter names, such as 00")
    options = parser.parse_args(arguments)
    root = Path.cwd()
    if options.command == "run":
        return _run_all(root, options.names)
    problems = check(root)
    for problem in problems:
        print(problem)
    if problems:
        print("\nNotebooks are generated: change the chapter, then run `make pairs`.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
