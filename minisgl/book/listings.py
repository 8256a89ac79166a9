"""Listings of the source that Python runs, and the map of the book: what is taught, where it is built and tested."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import minisgl
from minisgl.book.course_table import Concept, load_table
from minisgl.book.tables import WithCode, table

_ROOT = Path(minisgl.__file__).parent.parent
_COLUMNS = ("chapter", "concept", "module", "test")
_BETWEEN_WORDS = re.compile(r"(?<=[/_:])(?=\w)")


def show(item: type | Callable[..., Any]) -> WithCode:
    """Source of a class, function, method or Triton kernel, under its file and line.

    Paths in the package are given from its root, so that a listing looks the same on every machine.
    """
    target = inspect.unwrap(getattr(item, "fn", item))  # where Triton keeps the function that it compiles
    lines, first = inspect.getsourcelines(target)
    path = Path(inspect.getfile(target))
    name = path.relative_to(_ROOT).as_posix() if path.is_relative_to(_ROOT) else path.name
    code = textwrap.dedent("".join(lines)).rstrip()
    return WithCode(f"`{name}`, line {first}\n\n```python\n{code}\n```")


@dataclass(frozen=True, slots=True)
class ChapterMap:
    """A row for each concept. In a notebook a test's name may be broken between its words, so that a row fits."""

    concepts: tuple[Concept, ...]

    def __repr__(self) -> str:
        rows = [
            (_numbers(each), each.title, ", ".join(f"`{name}`" for name in each.modules), f"`{each.test}`")
            for each in self.concepts
        ]
        return table(_COLUMNS, rows).text

    def _repr_html_(self) -> str:
        rows = []
        for each in self.concepts:
            modules = "<br>".join(f"<code>{name}</code>" for name in each.modules)
            test = f"<code>{_BETWEEN_WORDS.sub('<wbr>', each.test)}</code>"
            rows.append(_html_row("td", (_numbers(each), escape(each.title), modules, test)))
        head = _html_row("th", _COLUMNS)
        return "\n".join([f"<table>\n<thead>{head}</thead>\n<tbody>", *rows, "</tbody>\n</table>"])


def chapter_map() -> ChapterMap:
    """Concepts with their modules, chapters and tests, in the order of the chapters."""
    return ChapterMap(tuple(concept for chapter in load_table().chapters.values() for concept in chapter.concepts))


def _html_row(tag: str, cells: Iterable[str]) -> str:
    """JupyterLab takes all tables for numbers, and aligns them to the right, unless told otherwise."""
    row = "".join(f'<{tag} style="text-align: left">{cell}</{tag}>' for cell in cells)
    return f"<tr>{row}</tr>"


def _numbers(concept: Concept) -> str:
    return ", ".join(map(str, concept.chapters))
