"""Whether the outputs that a notebook keeps are sound; and which of them show a kept result where there is no GPU."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from minisgl.book.course_table import Stub, load_table

BUDGET_FILE = "tests/kept-results-budget.txt"

_WIDGET = "application/vnd.jupyter.widget-view+json"
_MARK = "minisgl.measured"
"""What `minisgl.book.measured` and `kept` leave in the metadata of its outputs."""
_MEASURED_CALL = re.compile(r"""\b(?P<call>measured|kept)\(\s*["'](?P<name>[^"']+)["']""")
# A word is looked at from its beginning only: a picture is one of a hundred thousand letters.
_MACHINE_PATH = re.compile(r"/(home|root|Users|tmp|work)/\S+|(?<!\S)\S*site-packages\S*|[A-Z]:\\\\\S+")
_ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}")
_LISTING = re.compile(
    r"^(?P<file>`(?P<path>minisgl/[\w/]+\.py)`, line )(?P<line>\d+)\n\n```python\n(?P<code>.*)\n```$",
    re.DOTALL | re.MULTILINE,
)

_CHECKED = re.compile(r'^check\("(?P<task>[\d.]+)"', re.MULTILINE)

_SHOWN = re.compile(r"\bshow\(([\w.]+)\)")
_DEFINED = re.compile(r"^(?:async def|def|class) (\w+)", re.MULTILINE)


def drop_widgets(notebook: Any) -> None:
    """Keep of each widget its other forms only, such as the picture of a `minisgl.book.live`.

    A widget lives in the kernel that made it, under an id of chance; it appears when a reader runs the cell.
    """
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            output.get("data", {}).pop(_WIDGET, None)


def asked_in(notebook: Any) -> list[Stub]:
    """The functions that the tasks of a notebook ask for."""
    tasks = [found["task"] for cell in notebook.cells for found in _CHECKED.finditer(cell.source)]
    return [stub for task in tasks for stub in load_table().task(task).stubs]


def shows_ours(output: Any, asked: list[Stub]) -> bool:
    """Whether an output lists our source of a function that is asked for, by itself or within that of its class."""
    found = _listing_in(output)
    if found is None:
        return False
    of_class = re.search(r"^class (\w+)", found["code"], re.MULTILINE)
    return any(
        found["path"] == stub.path
        and (of_class is None or of_class[1] == stub.name.partition(".")[0])
        and re.search(rf"^ *def {stub.last_name}\(", found["code"], re.MULTILINE) is not None
        for stub in asked
    )


def fold_ours(notebook: Any) -> None:
    """Fold the outputs that list what readers are asked to write. JupyterLab shows three dots, which open them."""
    asked = asked_in(notebook)
    for cell in notebook.cells:
        if any(shows_ours(output, asked) for output in cell.get("outputs", [])):
            cell.metadata["jupyter"] = {"outputs_hidden": True}


def refresh_listings(notebook: Any, root: Path) -> None:
    """Give each listing of `minisgl.book.show` the source and the line that its function or class has now.

    What a cell lists is read off its calls of ``show``; where these do not tell, off the name that the listing defines.
    A listing of which neither says where it is now is left as it was, and `output_problems` names it.

    Args:
        notebook: its outputs are changed, in all of their forms.
        root: of the repository, whose source the listings show.
    """
    definitions = _definitions(root)
    homes = {name: path for cell in notebook.cells for name, path in _imported(cell.source)}
    for cell in notebook.cells:
        shown = _SHOWN.findall(cell.source)
        listings = [(output, found) for output in cell.get("outputs", []) if (found := _listing_in(output))]
        for place, (output, listing) in enumerate(listings):
            names = [shown[place]] if len(shown) == len(listings) else []
            if defined := _DEFINED.search(listing["code"]):
                names.append(defined[1])
            paths = [homes.get(names[0].partition(".")[0], "") if names else "", listing["path"]]
            if new := _listing_of(names, paths, definitions):
                old = listing[0]
                output.data = {form: _replaced(text, old, new) for form, text in output.data.items()}


def _definitions(root: Path) -> list[tuple[str, str, str]]:
    """(qualified name, path, listing) of every function, method and class of the package."""
    found: list[tuple[str, str, str]] = []
    for file in sorted((root / "minisgl").rglob("*.py")):
        path, text = file.relative_to(root).as_posix(), file.read_text(encoding="utf-8")
        lines = text.splitlines()

        def visit(body: list[ast.stmt], prefix: str, path: str = path, lines: list[str] = lines) -> None:
            for node in body:
                if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    code = textwrap.dedent("\n".join(lines[first - 1 : node.end_lineno])).rstrip()
                    listing = f"`{path}`, line {first}\n\n```python\n{code}\n```"
                    found.append((prefix + node.name, path, listing))
                    if isinstance(node, ast.ClassDef):
                        visit(node.body, f"{prefix}{node.name}.")

        visit(ast.parse(text).body, "")
    return found


def _imported(source: str) -> list[tuple[str, str]]:
    """(name, path of its module) of what a cell imports from the package."""
    found = re.findall(r"^from (minisgl[\w.]*) import ([^#\n]+)", source, re.MULTILINE)
    return [
        (name.split()[-1], module.replace(".", "/") + ".py")
        for module, names in found
        for name in names.strip("() ").split(",")
        if name.strip()
    ]


def _listing_of(names: list[str], paths: list[str], definitions: list[tuple[str, str, str]]) -> str | None:
    """The one listing that fits the first of ``names`` that any fits, in the first of ``paths`` if it is there."""
    for name in names:
        for tail in (".".join(name.split(".")[-2:]), name.split(".")[-1]):
            fitting = [each for each in definitions if f".{each[0]}".endswith(f".{tail}")]
            for chosen in (*([each for each in fitting if each[1] == path] for path in paths), fitting):
                if len(chosen) == 1:
                    return chosen[0][2]
    return None


def output_problems(notebook: Any, root: Path) -> list[str]:
    """What is wrong with a notebook's outputs, in sentences.

    Args:
        notebook: executed.
        root: of the repository, whose source the listings show.
    """
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    problems: list[str] = []
    if [cell.execution_count for cell in code] != list(range(1, len(code) + 1)):
        problems.append("not every code cell was executed once, from top to bottom")
    for cell in code:
        where = f"the cell {cell.source[:40]!r}"
        problems += [f"{where} {problem}" for output in cell.outputs for problem in _problems(output, root)]
    shown = {mark["name"] for mark in _marks(notebook)}
    for cell in code:
        for call, name in _MEASURED_CALL.findall(cell.source):
            if name not in shown:
                problems.append(f"{call}({name!r}) is not shown, so nobody sees where its numbers come from")
    return problems


def _problems(output: Any, root: Path) -> Iterator[str]:
    if output.output_type == "error" or output.get("name") == "stderr":
        yield "ends in an error or writes to stderr"
    text = nbformat.writes(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(outputs=[output])]))
    if path := _MACHINE_PATH.search(text):
        yield f"shows a path of some machine: {path[0]}"
    if address := _ADDRESS.search(text):
        yield f"shows an address, which is another one in each run: {address[0]}"
    if listing := _listing_in(output):
        yield from _listing_problems(listing, root)


def _listing_problems(listing: re.Match[str], root: Path) -> Iterator[str]:
    lines = _lines_of(listing, root)
    if not lines:
        yield "shows source that the package no longer has"
    elif int(listing["line"]) not in lines:
        now = " and ".join(map(str, lines))
        yield f"shows source at line {listing['line']} of {listing['path']}, where it is at {now}"


def _listing_in(output: Any) -> re.Match[str] | None:
    """What `minisgl.book.show` has left in an output, if it is that."""
    return _LISTING.search(output.get("data", {}).get("text/plain", ""))


def _replaced(text: str, old: str, new: str) -> str:
    """A text with another listing, whose place and code may have something between them."""
    for before, after in zip(old.split("\n\n", 1), new.split("\n\n", 1), strict=True):
        text = text.replace(before, after)
    return text


def _lines_of(listing: re.Match[str], root: Path) -> list[int]:
    """Lines of its file at which the code of a listing begins, as the file is now."""
    path = root / listing["path"]
    there = _without_indentation(path.read_text(encoding="utf-8")) if path.is_file() else []
    code = _without_indentation(listing["code"])
    return [first + 1 for first in range(len(there)) if there[first : first + len(code)] == code]


def _without_indentation(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def kept_results(notebook: Any) -> list[str]:
    """Outputs that show a kept result wherever there is no GPU, as in CI: the cell, and where its numbers come from."""
    return [f"the cell {mark['cell'][:40]!r} shows {mark['name']}.json: {mark['origin']}" for mark in _marks(notebook)]


def _marks(notebook: Any) -> Iterator[dict[str, Any]]:
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if mark := output.get("metadata", {}).get(_MARK):
                yield {**mark, "cell": cell.source}


def over_budget(root: Path, count: int) -> list[str]:
    """A sentence if that many outputs are more than the first line of ``tests/kept-results-budget.txt``."""
    budget = int((root / BUDGET_FILE).read_text(encoding="utf-8").partition("\n")[0])
    print(f"{count} outputs are kept results wherever there is no GPU; {BUDGET_FILE} allows {budget}")
    return [f"{count} kept results are more than the {budget} of {BUDGET_FILE}"] if count > budget else []
