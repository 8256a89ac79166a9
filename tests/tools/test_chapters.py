"""The shape of every chapter: how long it is, what stands in it, and how it is written."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.links import FENCE
from tools.notebooks import read_chapter

ROOT = Path(__file__).parents[2]
CHAPTERS = sorted((ROOT / "chapters").glob("[0-9][0-9]-*.md"))
TEXTS = sorted(set((ROOT / "chapters").glob("*.md")) - {ROOT / "chapters" / "SUMMARY.md"})
TELLTALE = re.compile(
    r"\b(somebody|nobody|everybody|whoever|whatever|wherever|whichever|what is left|of its own|by itself|"
    r"the same again|has to do with|in company|comes? about|what it takes|at the least|as well as that|"
    r"beforehand|thereby|whereby|thereof)\b",
    re.IGNORECASE,
)
"""Words by which a text sounds translated. One in a thousand is plain English; ten are a manner."""

FIGURE = re.compile(r"(?<![\w.,-])\d+(?:[.,]\d+)*(?!\w)")
MOST_FIGURES = 3
NO_PARAGRAPHS = re.compile(
    r"^ *(?P<fence>~~~|```).*?^ *(?P=fence) *$|^\$\$.*?\$\$|^ *(?:\||#).*?$", re.DOTALL | re.MULTILINE
)
"""Blocks of code, formulas in lines of their own, lines of tables and headings."""
NO_FIGURES = re.compile(
    r"`[^`]*`|\$[^$]*\$|!?\[[^\]]*\]\([^)]*\)|</?\w[^>]*>|"
    r"\b[Cc]hapters? \d+(?:(?:, | to | (?:and|or) |, (?:and|or) )\d+)*|"
    r"(?:\b[A-Z]\w*|[,;(]) ?(?:19|20)\d\d\b"
)
"""Code spans, formulas, links, tags, numbers of chapters, and years: of a conference, after a name, or in brackets."""
EXCUSED = {
    "12": ("Two kernels read 3 rows and write 2 altogether.",),
    "19": (
        "4 + 16/32 = 4.5, and with a float16 zero point",
        "The large one is 127, so the others are 1 or 0",
        "It reads 0.1 + 0.9/4 ≈ 0.33 of the bytes",
        "**FP8.** Large deployments use it by default.",
    ),
}
"""Paragraphs with more figures, by their chapter and first words: sums with their answers, and a list of formats."""

every_chapter = pytest.mark.parametrize("path", CHAPTERS, ids=lambda path: path.stem[:2])


def prose(path: Path) -> str:
    """Tables and formulas are part of it; cells, blocks and code spans are not."""
    return re.sub(r"`[^`]*`", "", FENCE.sub("", path.read_text(encoding="utf-8")))


def cells(path: Path) -> list[str]:
    found = read_chapter(path.read_text(encoding="utf-8")).cells
    return [cell.source for cell in found if cell.cell_type == "code"]


def paragraphs(text: str) -> list[str]:
    """The prose of a chapter, one line for each paragraph or item of a list, without what numbers the items."""
    parts = re.split(r"\n\s*\n|\n(?= *(?:\d+\.|[-*]) )", NO_PARAGRAPHS.sub("\n\n", text))
    lines = (re.sub(r"^(?:</?\w[^>]*>|\d+\. |[-*] )+", "", " ".join(part.split())) for part in parts)
    return [line for line in lines if line]


def figures(paragraph: str) -> list[str]:
    """The numbers in digits that a reader of a paragraph has to keep in mind."""
    return FIGURE.findall(NO_FIGURES.sub(" ", paragraph))


def calls(source: str, name: str) -> bool:
    """Whether a cell calls a function by its name; a mention in a comment or a string is no call."""
    called = [node.func for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return any(isinstance(each, ast.Name) and each.id == name for each in called)


def is_picture(output: Any) -> bool:
    """Whether a notebook's output is drawn: an SVG, or several of them to step through."""
    data = output.get("data", {})
    return "image/svg+xml" in data or "svg" in data.get("text/html", "")


@every_chapter
def test_a_chapter_can_be_read_in_an_evening(path: Path) -> None:
    assert 2000 <= len(prose(path).split()) <= 3500


@every_chapter
def test_a_cell_fits_on_a_screen(path: Path) -> None:
    assert [code for code in cells(path) if len(code.splitlines()) > 35] == []


@every_chapter
def test_a_chapter_says_where_we_are(path: Path) -> None:
    number = int(path.stem[:2])
    shown = "chapter_map(" if number == 0 else f"you_are_here({number})"
    assert any(shown in code for code in cells(path))


@every_chapter
def test_a_chapter_has_at_least_three_pictures(path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / f"{path.stem}.ipynb", as_version=4)
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert sum(map(is_picture, outputs)) >= 3


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.stem)
def test_the_english_is_plain(path: Path) -> None:
    text = prose(path)
    found = [match[0] for match in TELLTALE.finditer(text)]
    assert len(found) < 0.001 * len(text.split()) or len(found) <= 1, found


def docstrings(source: str) -> list[str]:
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    found = [ast.get_docstring(node) for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    return [each for each in found if each]


def test_the_english_of_docstrings_is_plain() -> None:
    texts = {
        path.relative_to(ROOT).as_posix(): " ".join(docstrings(path.read_text(encoding="utf-8")))
        for path in sorted((ROOT / "minisgl").rglob("*.py"))
    }
    words = sum(len(text.split()) for text in texts.values())
    found = [f"{name}: {match[0]}" for name, text in texts.items() for match in TELLTALE.finditer(text)]
    assert words > 10_000
    assert len(found) <= 0.001 * words, found


def test_docstrings_of_all_kinds_are_read() -> None:
    source = '''"""A."""
class B:
    """B."""
    async def c(self):
        """C."""
def d():
    "no" + "docstring"'''
    assert docstrings(source) == ["A.", "B.", "C."]


@every_chapter
def test_a_paragraph_has_few_figures(path: Path) -> None:
    found = [each for each in paragraphs(path.read_text(encoding="utf-8")) if len(figures(each)) > MOST_FIGURES]
    excuses = EXCUSED.get(path.stem[:2], ())
    assert [each for each in found if not each.startswith(excuses)] == []
    unused = [excuse for excuse in excuses if not any(each.startswith(excuse) for each in found)]
    assert unused == [], "take these out of EXCUSED"


def test_figures_are_counted_where_they_burden_a_reader() -> None:
    text = """\
## 1, 2, 3 and 4

1. It fed 40 tokens, 1,024 places
   and 0.5 of 7 pages.
2. As `[1, 2, 3]` and $4$ say in chapters 5, 6 and 7 ([issue 8](https://example.org/9), SOSP 2023):
   SHA-256 of float32, once in 16-bit pages.

| 1 | 2 |
|---|---|

$$1 + 2

= 3$$

<details><summary>Of 8 heads?</summary>

~~~bash
seq 1 2 3
~~~
"""
    found = paragraphs(text)
    assert [each.partition(" ")[0] for each in found] == ["It", "As", "Of"]
    assert [figures(each) for each in found] == [["40", "1,024", "0.5", "7"], ["16"], ["8"]]


def test_at_least_four_chapters_have_controls_that_change_a_live_object() -> None:
    found = [path.stem[:2] for path in CHAPTERS if any(calls(code, "live") for code in cells(path))]
    assert {"04", "06", "08", "09"} <= set(found)


def test_a_mention_is_no_call() -> None:
    assert calls("x = 1\nlive(draw, {})", "live")
    assert not calls("# live(draw)\nsaid = 'live(draw)'\nscheduler.live(1)", "live")
