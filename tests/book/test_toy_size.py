"""Ours of the toy engine is short enough to be read. A reader's own may be longer: no task has this test."""

from __future__ import annotations

import ast
from pathlib import Path

from minisgl.book import toy


def lines_of_code(source: str) -> int:
    """Lines that are neither blank, nor comments, nor docstrings."""
    documented: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef) and ast.get_docstring(node) is not None:
            first = node.body[0]
            documented |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    lines = enumerate(map(str.strip, source.splitlines()), start=1)
    return sum(bool(line) and not line.startswith("#") and number not in documented for number, line in lines)


def test_it_is_at_most_200_lines() -> None:
    assert lines_of_code('"""A."""\n\n# b\nx = 1\n') == 1
    assert lines_of_code(Path(toy.__file__).read_text(encoding="utf-8")) <= 200
