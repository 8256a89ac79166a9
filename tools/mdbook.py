"""The web pages: mdBook, with each notebook's outputs under the cells that made them.

``python -m tools.mdbook`` builds the book into ``book/``. It fails, with the pages written all the same, on a notebook
that is not its chapter's or that was not run, on dead links, and on any warning of mdBook, which by itself is content
with all of these.
``python -m tools.mdbook preprocess`` is what ``book.toml`` names as a preprocessor: the book as JSON, in and out.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

from tools.links import chapter_problems, site_problems
from tools.maths import with_maths
from tools.notebooks import HOSTED, check, pair
from tools.outputs import asked_in, shows_ours

_TOOLS = Path(__file__).parent.parent
_PICTURES = "BOOK_PICTURES"
"""Environment variable: the directory for pictures, which are put into the pages after mdBook has made its index, so
that a search finds and shows prose."""
_PLACE = re.compile(r'<figure class="output" data-picture="(?P<name>\w+)"></figure>')
_IMAGE = re.compile(r'<img alt="[^"]*" src="data:image/svg\+xml;base64,(?P<data>[^"]*)">')
_DRAWING = re.compile(r"!\[[^\]]*\]\((?P<path>images/[\w-]+\.svg)\)")

_INLINE_CODE = re.compile(r"<code>[^<]+</code>")
_OPTION = re.compile(r"(?<![\w./-])--?[A-Za-z][\w-]*")


def build(root: Path, site: Path) -> int:
    """Build with the Python that runs this.

    Args:
        root: directory of ``book.toml``.
        site: directory for the pages.

    Returns:
        The exit status.
    """
    paths = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": str(_TOOLS)}
    added = {name: os.pathsep.join(filter(None, [path, os.environ.get(name)])) for name, path in paths.items()}
    command = ["mdbook", "build", "--dest-dir", str(site.absolute()), str(root)]
    with tempfile.TemporaryDirectory() as pictures:
        env = {**os.environ, **added, _PICTURES: pictures}
        done = subprocess.run(command, cwd=root, env=env, stderr=subprocess.PIPE, text=True, check=False)
        sys.stderr.write(done.stderr)
        if done.returncode != 0:
            return done.returncode
        for page in site.rglob("*.html"):
            _finish(page, Path(pictures))
    problems = [*check(root), *chapter_problems(root), *site_problems(site)]
    if any(word in done.stderr for word in ("WARN", "ERROR")):
        problems.append("mdBook warns about the book: see above")
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


def _finish(page: Path, pictures: Path) -> None:
    """Put pictures into a page of mdBook's, and keep each option of a command in one piece."""
    text = page.read_text(encoding="utf-8")
    kept = _INLINE_CODE.sub(lambda code: _OPTION.sub(r'<span class="option">\g<0></span>', code[0]), text)
    filled = _PLACE.sub(lambda place: (pictures / place["name"]).read_text(encoding="utf-8"), kept)
    if filled != text:
        page.write_text(filled, encoding="utf-8")


def preprocess(context: dict[str, Any], book: dict[str, Any]) -> dict[str, Any]:
    """Insert the outputs into every chapter, and formulas that browsers understand.

    Args:
        context: mdBook's, of which ``root`` is used, the directory of ``book.toml``.
        book: mdBook's tree of ``items``; changed in place.

    Raises:
        ValueError: a formula cannot be converted.
    """
    notebooks, source = (Path(context["root"]) / name for name in ("notebooks", "chapters"))
    book["items"] = list(_with_parts(book["items"], source))
    for chapter in _chapters(book["items"]):
        name = Path(chapter["path"] or "").stem
        try:
            text = as_markdown(pair(chapter["content"], notebooks / f"{name}.ipynb"))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
        chapter["content"] = _DRAWING.sub(lambda found: _picture((source / found["path"]).read_text("utf-8")), text)
    return book


def _with_parts(items: list[Any], source: Path) -> Iterator[Any]:
    """The items, and below each part's title its introduction, ``part-1.md`` and so on, as a page without a number.

    SUMMARY.md cannot have such a page there.
    """
    parts = 0
    for item in items:
        yield item
        if isinstance(item, dict) and "PartTitle" in item:
            parts += 1
            path = source / f"part-{parts}.md"
            if path.is_file():
                text = path.read_text(encoding="utf-8")
                page = {"name": "About this part", "content": text, "path": path.name, "source_path": path.name}
                yield {"Chapter": {**page, "number": None, "sub_items": [], "parent_names": []}}


def _chapters(items: list[Any]) -> Iterator[dict[str, Any]]:
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from _chapters(item["Chapter"]["sub_items"])


def as_markdown(notebook: Any) -> str:
    """A notebook with its outputs, for mdBook. What its readers are asked to write is folded where it is listed."""
    blocks: list[str] = []
    asked = asked_in(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            blocks.append(with_maths(cell.source))
            continue
        if HOSTED in cell.metadata.get("tags", []):
            continue
        blocks.append(f"```python\n{cell.source}\n```")
        for output in cell.outputs:
            rendered = _render(output)
            folded = f"<details>\n<summary>Show ours</summary>\n\n{rendered}\n\n</details>"
            blocks.append(folded if shows_ours(output, asked) else rendered)
    return "\n\n".join(blocks) + "\n"


def _render(output: Any) -> str:
    """One output as Markdown, in the richest form that it has."""
    if output.output_type == "stream":
        return _preformatted(output.text)
    data = output.data
    if "image/svg+xml" in data:
        return _picture(data["image/svg+xml"])
    if "image/png" in data:
        description = escape(output.metadata.get("image/png", {}).get("alt", data.get("text/plain", "")))
        png = "".join(data["image/png"].split())
        return f'<figure class="output"><img alt="{description}" src="data:image/png;base64,{png}"></figure>'
    if "text/html" in data:
        if _IMAGE.search(data["text/html"]):  # drawings, so that they follow the theme
            return _picture(_IMAGE.sub(lambda image: base64.b64decode(image["data"]).decode(), data["text/html"]))
        lines = filter(str.strip, data["text/html"].splitlines())  # a blank line would end it
        return "\n".join(['<div class="output">', *lines, "</div>"])
    if "text/markdown" in data:
        kind = "output wide" if _is_wide(data["text/markdown"]) else "output"
        return f'<div class="{kind}">\n\n{data["text/markdown"]}\n\n</div>'
    return _preformatted(data["text/plain"])


def _is_wide(text: str) -> bool:
    """Whether a table has both sentences and too many columns for them on a phone."""
    rows = [line.split(" | ") for line in re.sub(r"^\|.*\n(?=\| -)", "", text, flags=re.MULTILINE).splitlines()]
    return any(len(row) > 3 and max(map(len, row)) > 20 for row in rows if row[0].startswith("|"))


def _picture(html: str) -> str:
    """A figure, or where mdBook is run by `build` the place of one."""
    lines = "\n".join(filter(str.strip, html.splitlines()))  # a blank line would end it
    figure = f'<figure class="output">{lines}</figure>'
    if (pictures := os.environ.get(_PICTURES)) is None:
        return figure
    name = hashlib.sha256(figure.encode()).hexdigest()
    Path(pictures, name).write_text(figure, encoding="utf-8")
    return f'<figure class="output" data-picture="{name}"></figure>'


def _preformatted(text: str) -> str:
    return f'<pre class="output">{escape(text.rstrip(), quote=False)}</pre>'


def main(arguments: list[str]) -> int:
    """Run the command; returns the exit status."""
    if arguments[:1] != ["preprocess"]:
        return build(Path.cwd(), Path("book"))
    if arguments[1:2] == ["supports"]:
        return 0 if arguments[2:] == ["html"] else 1
    try:
        json.dump(preprocess(*json.load(sys.stdin)), sys.stdout)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
