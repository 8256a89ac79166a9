"""``diff``: what a chapter adds to the package of the chapter before."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from minisgl.course.sources import Sources
from minisgl.course.workspace import package, suite_until


def changes(sources: Sources, chapter: int) -> Iterator[str]:
    """Lines: the new files, then a unified diff of the changed ones."""
    sources.table.chapter(chapter)
    before, after = package(sources, chapter - 1, chapter), package(sources, chapter, chapter + 1)
    old_tests, new_tests = suite_until(sources, chapter - 1), suite_until(sources, chapter)
    for path, text in sorted(after.items()):
        if path not in before:
            yield f"new: {path} ({len(text.splitlines())} lines)"
    yield from (f"new: {path}" for path in sorted(new_tests) if path not in old_tests)
    for path, text in sorted(after.items()):
        if path in before and before[path] != text:
            lines = before[path].splitlines(), text.splitlines()
            yield from difflib.unified_diff(*lines, f"a/{path}", f"b/{path}", lineterm="")
