"""Chapters and the course's table agree: what is taught is in the package and in a test, and readers hear of tasks."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys

import pytest

import minisgl.book
from minisgl.book.course_table import Concept, load_table
from minisgl.book.starters import repository
from tools.notebooks import read_chapter

ROOT = repository()
TABLE = load_table()
CONCEPTS = [concept for chapter in TABLE.chapters.values() for concept in chapter.concepts]
HOW_MANY = 34
"""So that none is left out by accident."""


def test_the_book_has_all_its_concepts() -> None:
    assert len({concept.title for concept in CONCEPTS}) == len(CONCEPTS) == HOW_MANY
    assert all(chapter.concepts for chapter in TABLE.chapters.values()), "no chapter teaches nothing"


@pytest.mark.parametrize("concept", CONCEPTS, ids=lambda concept: concept.title)
def test_modules_and_chapters_of_a_concept_are_there(concept: Concept) -> None:
    for module in concept.modules:
        importlib.import_module(module)
    assert list(concept.chapters) == sorted(set(concept.chapters))
    for chapter in concept.chapters:
        assert list((ROOT / "chapters").glob(f"{chapter:02d}-*.md")), f"there is no chapter {chapter}"


@pytest.mark.slow
def test_the_tests_of_concepts_are_collected() -> None:
    """By a pytest of its own, as it does without a GPU."""
    named = sorted({concept.test for concept in CONCEPTS})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", *named]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:]
    collected = done.stdout.splitlines()
    for test in named:
        assert any(re.match(rf"{re.escape(test)}(\[|::|$)", line) for line in collected), f"there is nothing in {test}"


def test_no_module_says_which_chapter_it_belongs_to() -> None:
    """The order of teaching stands in the course's table alone."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "minisgl").rglob("*.py")}
    assert len(texts) > 100
    assert [name for name, text in texts.items() if re.match(r'"""[^"]*\bchapters? \d+', text, re.IGNORECASE)] == []


def test_chapters_with_tasks_name_the_command_that_gives_them() -> None:
    """Where their exercises are, each with its own number."""
    for chapter in (each for each in TABLE.chapters.values() if each.tasks):
        (path,) = (ROOT / "chapters").glob(f"{chapter.number:02d}-*.md")
        text = " ".join(path.read_text(encoding="utf-8").split())
        exercises = text.partition(" ## Exercises ")[2].partition(" ## ")[0]
        assert set(re.findall(r"python -m minisgl course start (\d+) ", exercises)) == {str(chapter.number)}, path.name


def lost_displays(cell: str) -> list[str]:
    """Calls whose picture, table or listing is lost: IPython displays the last expression of a cell alone."""
    drawing = set(dir(minisgl.book)) - {"check"}  # which prints
    calls = [node.value for node in ast.parse(cell).body[:-1] if isinstance(node, ast.Expr)]
    return [
        ast.unparse(call)
        for call in calls
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in drawing
    ]


def test_what_a_cell_draws_comes_last() -> None:
    assert lost_displays("show(one)\nshow(other)") == ["show(one)"]
    assert lost_displays("check('1.1', one)\nshow(one)") == []
    for path in sorted((ROOT / "chapters").glob("[0-9]*.md")):
        cells = [
            cell.source for cell in read_chapter(path.read_text(encoding="utf-8")).cells if cell.cell_type == "code"
        ]
        assert [lost for cell in cells for lost in lost_displays(cell)] == [], path.name
