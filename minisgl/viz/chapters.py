"""The map of the book, read off the package: every module says in its docstring which chapter it belongs to."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import minisgl
from minisgl.viz.markdown import Markdown, table

_ROOT = Path(minisgl.__file__).parent
_CHAPTER = re.compile(r"Chapters? (?P<numbers>\d+(?:(?:, | and )\d+)*)(?:,[^:.]*)?: (?P<concept>.*?)\.?(?= Chapter |$)")


def chapter_map(root: Path = _ROOT) -> Markdown:
    """Table of concept, module and chapter, in the order of the chapters.

    Args:
        root: directory of the package to read. Its files are parsed, not imported.
    """
    rows = sorted(entry for path in root.rglob("*.py") for entry in _entries(path, root))
    return table(
        ["chapter", "concept", "module"], [(numbers, concept, f"`{name}`") for _, name, numbers, concept in rows]
    )


def _entries(path: Path, root: Path) -> Iterator[tuple[int, str, str, str]]:
    """(first chapter, module, chapters, concept) for each ``Chapter N: …`` in the first line of the docstring."""
    parts = path.relative_to(root.parent).with_suffix("").parts
    name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    docstring = ast.get_docstring(ast.parse(path.read_text())) or ""
    for entry in _CHAPTER.finditer(docstring.partition("\n")[0]):
        yield int(re.split("[, ]", entry["numbers"])[0]), name, entry["numbers"], entry["concept"]
