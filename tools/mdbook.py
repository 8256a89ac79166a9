"""The web pages: mdBook, with each notebook's outputs under the cells that made them.

``python -m tools.mdbook`` builds the book into ``book/`` and fails on any warning of mdBook, which itself does not.
``python -m tools.mdbook preprocess`` is what ``book.toml`` names as a preprocessor: the book as JSON, in and out.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

import jupytext
import nbformat


def build() -> int:
    """Build with the Python that runs this; returns the exit status."""
    bin_dir = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": bin_dir + os.pathsep + os.environ["PATH"]}
    done = subprocess.run(["mdbook", "build"], env=environment, stderr=subprocess.PIPE, text=True, check=False)
    sys.stderr.write(done.stderr)
    if done.returncode == 0 and any(word in done.stderr for word in ("WARN", "ERROR")):
        print("mdBook warns about the book: see above", file=sys.stderr)
        return 1
    return done.returncode


def preprocess(context: dict[str, Any], book: dict[str, Any]) -> dict[str, Any]:
    """Insert the outputs into every chapter that has a notebook.

    Args:
        context: mdBook's, of which ``root`` is used, the directory of ``book.toml``.
        book: mdBook's tree of ``items``; changed in place.
    """
    notebooks = Path(context["root"]) / "notebooks"
    for chapter in _chapters(book["items"]):
        path = notebooks / f"{Path(chapter['path'] or '').stem}.ipynb"
        if path.is_file():
            chapter["content"] = with_outputs(chapter["content"], nbformat.read(path, as_version=4))
    return book


def _chapters(items: list[Any]) -> Iterator[dict[str, Any]]:
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from _chapters(item["Chapter"]["sub_items"])


def with_outputs(text: str, notebook: Any) -> str:
    """Markdown of a chapter with its outputs.

    Args:
        text: the chapter.
        notebook: its pair.

    Raises:
        ValueError: the two do not have the same cells.
    """
    cells = jupytext.reads(text, fmt="md").cells
    if [cell.source for cell in cells] != [cell.source for cell in notebook.cells]:
        raise ValueError(f"the notebook of {text.splitlines()[0]!r} is not up to date: run `make pairs`")
    blocks: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            blocks.append(cell.source)
        else:
            blocks.append(f"```python\n{cell.source}\n```")
            blocks += [_render(output) for output in cell.outputs]
    return "\n\n".join(blocks) + "\n"


def _render(output: Any) -> str:
    """One output as Markdown, in the richest form that it has."""
    if output.output_type == "stream":
        return _preformatted(output.text)
    data = output.data
    if "image/svg+xml" in data:
        return f'<figure class="output">{"".join(data["image/svg+xml"].splitlines())}</figure>'
    if "text/markdown" in data:
        return f'<div class="output">\n\n{data["text/markdown"]}\n\n</div>'
    return _preformatted(data["text/plain"])


def _preformatted(text: str) -> str:
    return f'<pre class="output">{escape(text.rstrip(), quote=False)}</pre>'


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if arguments[:1] != ["preprocess"]:
        return build()
    if arguments[1:2] == ["supports"]:
        return 0 if arguments[2:] == ["html"] else 1
    json.dump(preprocess(*json.load(sys.stdin)), sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
