"""Chapters and their notebooks: generated in one direction, and compared.

``python -m tools.notebooks pair [NAME ...]`` generates the notebooks of chapters (all, or those whose names begin so)
without executing them: cells that are as they were keep their outputs, in which listings get the source and the line
that their code has now.
``python -m tools.notebooks run [NAME ...]`` executes chapters into notebooks; with ``--into FOLDER``, into copies
there: what a machine with a GPU shows, beside the notebooks of the book. A chapter with a cell that fails keeps the
notebook that it has, and the next one follows.
``python -m tools.notebooks check`` generates the notebooks once more, in memory, and fails if any differs from the one
that is there, if its outputs are not sound, or if more of them are kept results than the budget allows. It looks at
contents alone, never at the times of files, so it says the same of a fresh clone.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from collections import Counter
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from time import perf_counter
from typing import Any

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from tools.outputs import drop_widgets, fold_ours, kept_results, output_problems, over_budget, refresh_listings

CHAPTER_FILES = "[0-9][0-9]-*.md"
CELL_TIMEOUT = 900
"""Seconds that one cell may run: the first one fetches the default model, which takes minutes on a slow line."""

HOSTED = "hosted"
"""Tag of the cell that chapters don't have and notebooks begin with, below their title. The site leaves it out."""
_HOSTED_CELL = nbformat.v4.new_code_cell(
    """# @title In a hosted notebook this cell installs the book. On your own machine it does nothing.
REPOSITORY = "https://github.com/YOUR-NAME/minisgl"  # there, put the address of your copy here

from importlib.util import find_spec

if find_spec("minisgl") is None:
    import sys

    if "YOUR-NAME" in REPOSITORY:
        raise ValueError("minisgl isn't installed here: put your copy's address into REPOSITORY, in this cell")
    !git clone --quiet --depth 1 {REPOSITORY} minisgl-book
    %pip install --quiet --editable "./minisgl-book[book]"
    sys.path.append("minisgl-book")""",
    id=HOSTED,
    # Folded in JupyterLab, and in Colab, which shows the title alone.
    metadata={"tags": [HOSTED], "jupyter": {"source_hidden": True}, "cellView": "form"},
)

_METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def read_chapter(text: str) -> Any:
    """The cells of a chapter as a notebook without outputs. A cell's id is a hash of its text."""
    notebook = jupytext.reads(text, fmt="md")
    seen: Counter[str] = Counter()
    for cell in notebook.cells:
        digest = hashlib.sha256(cell.source.encode()).hexdigest()[:8]
        seen[digest] += 1
        cell.id = digest if seen[digest] == 1 else f"{digest}-{seen[digest]}"
    return notebook


def _generate(text: str) -> Any:
    """The notebook of a chapter, without outputs: its cells, and the one for hosted notebooks."""
    notebook = read_chapter(text)
    notebook.metadata = nbformat.from_dict(_METADATA)
    title = bool(notebook.cells and notebook.cells[0].cell_type == "markdown")
    notebook.cells.insert(int(title), deepcopy(_HOSTED_CELL))
    return notebook


def pair(text: str, notebook_path: Path) -> Any:
    """The notebook that a chapter generates, with what the one at ``notebook_path`` has below the same cells."""
    notebook = _generate(text)
    if not notebook_path.is_file():
        return notebook
    before = {cell.get("id"): cell for cell in _read(notebook_path).cells}
    for cell in notebook.cells:
        if cell.cell_type == "code" and cell.id in before:
            cell.outputs = before[cell.id].outputs
            cell.execution_count = before[cell.id].execution_count
    drop_widgets(notebook)
    fold_ours(notebook)
    return notebook


def run(chapter: Path, notebook_path: Path) -> None:
    """Execute a chapter and write its notebook, without times or anything else that differs from run to run.

    Wherever it is written, it runs in the folder ``notebooks`` beside the folder of chapters.
    """
    notebook = _generate(_text(chapter))
    NotebookClient(
        notebook,
        kernel_name="python3",
        timeout=CELL_TIMEOUT,
        resources={"metadata": {"path": str(chapter.parent.parent / "notebooks")}},
        extra_arguments=["--log-level=ERROR"],
        record_timing=False,
        coalesce_streams=True,
    ).execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    drop_widgets(notebook)
    fold_ours(notebook)
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
        found = _pairing_problems(path, notebooks[name]) or output_problems(_read(notebooks[name]), root)
        problems += [f"notebooks/{name}.ipynb: {problem}" for problem in found]
    return problems


def _text(chapter: Path) -> str:
    return chapter.read_text(encoding="utf-8")


def _read(notebook_path: Path) -> Any:
    return nbformat.read(notebook_path, as_version=4)


def _pairing_problems(chapter: Path, notebook_path: Path) -> list[str]:
    text = _text(chapter)
    generated, there = pair(text, notebook_path), _read(notebook_path)
    if jupytext.writes(read_chapter(text), fmt="md") != text:
        return [f"saving it in JupyterLab would change {chapter.name}: run `jupytext --to md {chapter}`"]
    for number, (cell, other) in enumerate(zip(generated.cells, there.cells, strict=False)):
        if _identity(cell) != _identity(other):
            return [f"cell {number} differs from the chapter: {other.source[:60]!r}"]
        if cell.cell_type == "markdown" and cell.source.count("<details>") != cell.source.count("</details>"):
            return [f"cell {number} folds an answer that it does not end: leave code cells out of <details>"]
    if len(generated.cells) != len(there.cells):
        return [f"{len(there.cells)} cells, the chapter has {len(generated.cells)}"]
    if nbformat.writes(generated) + "\n" != notebook_path.read_text(encoding="utf-8"):
        return ["is not written as the chapter generates it"]
    return []


def _identity(cell: Any) -> tuple[str, str, list[str]]:
    return cell.cell_type, cell.source, cell.metadata.get("tags", [])


def _chosen(root: Path, names: list[str]) -> Iterator[tuple[Path, Path]]:
    """Chapters and the paths of their notebooks.

    Raises:
        SystemExit: no chapter's name begins so.
    """
    paths = sorted((root / "chapters").glob(CHAPTER_FILES))
    for name in names:
        if not any(path.name.startswith(name) for path in paths):
            sys.exit(f"no chapter's name begins with {name!r}")
    for path in paths:
        if not names or path.name.startswith(tuple(names)):
            yield path, root / "notebooks" / f"{path.stem}.ipynb"


def _check_all(root: Path) -> int:
    problems = check(root)
    kept = {path.name: kept_results(_read(path)) for path in sorted((root / "notebooks").glob("*.ipynb"))}
    for name, reasons in kept.items():
        for reason in reasons:
            print(f"notebooks/{name}: {reason}")
    problems += over_budget(root, sum(map(len, kept.values())))
    for problem in problems:
        print(problem)
    if problems:
        print("\nNotebooks are generated: change the chapter, then run `make pair`, or `make execute` for new outputs.")
    return 1 if problems else 0


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.notebooks", description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["pair", "run", "check"])
    parser.add_argument("names", nargs="*", help="beginnings of chapter names, such as 00")
    parser.add_argument("--into", type=Path, metavar="FOLDER", help="where `run` writes, instead of notebooks/")
    options = parser.parse_args(arguments)
    if options.into and options.command != "run":
        parser.error(f"--into goes with run, not with {options.command}")
    root = Path.cwd()
    if options.command == "check":
        return _check_all(root)
    status = 0
    for chapter, notebook_path in _chosen(root, options.names):
        if options.command == "pair":
            notebook = pair(_text(chapter), notebook_path)
            refresh_listings(notebook, root)
            nbformat.write(notebook, notebook_path)
            continue
        print(f"executing {chapter.name}", flush=True)
        begin = perf_counter()
        if options.into:
            options.into.mkdir(parents=True, exist_ok=True)
            notebook_path = options.into / notebook_path.name
        try:
            run(chapter, notebook_path)
            print(f"  took {perf_counter() - begin:.0f} s", flush=True)
        except CellExecutionError as error:  # the others may be right, and time on a GPU is short
            print(error, file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
