from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

from minisgl.book import memory_budget, player
from minisgl.book.course_table import load_table
from minisgl.book.tables import WithCode
from tools.mdbook import as_markdown, build, main, preprocess
from tools.notebooks import pair, read_chapter
from tools.outputs import fold_ours

CHAPTER = """# A chapter

```python
f()
```

and so on.
"""
ROOT = Path(__file__).parents[2]


def notebook(*outputs: Any) -> Any:
    """What a run of the chapter leaves."""
    made = pair(CHAPTER, Path("no notebook yet"))
    hosted, called = (cell for cell in made.cells if cell.cell_type == "code")
    hosted.execution_count, called.execution_count = 1, 2
    called.outputs = list(outputs)
    return made


def result(**data: str) -> Any:
    return nbformat.v4.new_output("execute_result", {key.replace("__", "/"): value for key, value in data.items()})


def shown(*outputs: Any) -> str:
    return as_markdown(notebook(*outputs))


def test_printed_text_is_escaped_and_stands_below_its_cell() -> None:
    assert shown(nbformat.v4.new_output("stream", text="<|end|> & *so*\n\non\n")) == (
        '# A chapter\n\n```python\nf()\n```\n\n<pre class="output">&lt;|end|&gt; &amp; *so*\n\non</pre>\n\nand so on.\n'
    )


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"image/svg+xml": "<svg>\n\n</svg>", "image/png": "AA=="}, '<figure class="output"><svg>\n</svg></figure>'),
        (
            {"image/png": "AA\n==\n"},
            '<figure class="output"><img alt="words" src="data:image/png;base64,AA=="></figure>',
        ),
        ({"text/html": "<b>\n\n x</b>", "text/markdown": "x"}, '<div class="output">\n<b>\n x</b>\n</div>'),
        ({"text/markdown": "| a |\n| --- |"}, '<div class="output">\n\n| a |\n| --- |\n\n</div>'),
        ({}, '<pre class="output">words</pre>'),
    ],
)
def test_the_richest_form_is_shown(data: dict[str, str], expected: str) -> None:
    made = shown(nbformat.v4.new_output("display_data", {**data, "text/plain": "words"}))
    assert made == f"# A chapter\n\n```python\nf()\n```\n\n{expected}\n\nand so on.\n"


@pytest.mark.parametrize(
    ("heading", "cell", "kind"),
    [("d", "a sentence of more than one word", "output wide"), ("a heading of several words", "d", "output")],
)
def test_tables_with_sentences_beside_many_columns_are_wide(heading: str, cell: str, kind: str) -> None:
    table = f"| a | b | c | {heading} |\n| --- | --- | ---: | --- |\n| a | b | c | {cell} |"
    assert f'<div class="{kind}">\n\n| a |' in shown(nbformat.v4.new_output("display_data", {"text/markdown": table}))


def test_a_photograph_has_the_words_that_its_cell_gives() -> None:
    data, words = {"image/png": "AA==", "text/plain": "<Image object>"}, {"image/png": {"alt": "a page"}}
    assert '<img alt="a page" src=' in shown(nbformat.v4.new_output("execute_result", data, metadata=words))


def test_frames_of_a_player_are_drawn_so_that_they_follow_the_theme() -> None:
    frame = memory_budget({"weights": 1}, 2)
    made = shown(
        nbformat.v4.new_output("display_data", {"text/html": player([frame])._repr_html_(), "text/plain": "x"})
    )
    assert f"<summary>1 of 1</summary>{frame.svg}</details>" in made
    assert "base64" not in made
    assert "<script>" in made
    figure = made[made.index("<figure") : made.index("</figure>")]
    assert "" not in figure.split("\n"), "a blank line would end it"


def test_a_drawing_of_the_prose_follows_the_theme_and_scrolls_on_a_phone(tmp_path: Path) -> None:
    (tmp_path / "chapters" / "images").mkdir(parents=True)
    (tmp_path / "chapters" / "images" / "a.svg").write_text("<svg class='viz'></svg>\n")
    book = {"items": [chapter("preface.md", text="# P\n\n![An\nengine](images/a.svg)\n")]}
    (made,) = preprocess({"root": str(tmp_path)}, book)["items"]
    assert made["Chapter"]["content"] == "# P\n\n<figure class=\"output\"><svg class='viz'></svg></figure>\n"


OURS = """# A chapter

```python
check("6.6", lock, unlock)
```

```python
show(RadixCache.lock)
```
"""
LISTED = {
    "the first function of the task": ("def lock(self, handle):\n    pass", True),
    "its second function": ("def unlock(self, handle):\n    pass", True),
    "the class with both": ("class RadixCache:\n    def lock(self, handle):\n        pass", True),
    "another function of the file": ("def split(self):\n    self.lock(1)", False),
    "a function of that name in another class": ("class Latch:\n    def lock(self):\n        pass", False),
}


@pytest.mark.parametrize(("code", "folded"), LISTED.values(), ids=LISTED)
def test_what_readers_are_asked_to_write_is_folded(code: str, folded: bool) -> None:
    made = read_chapter(OURS)
    listing = WithCode(f"`minisgl/kvcache/radix.py`, line 1\n\n```python\n{code}\n```")
    forms = {"text/markdown": listing._repr_markdown_(), "text/plain": repr(listing)}
    made.cells[2].outputs = [nbformat.v4.new_output("execute_result", forms)]
    text = as_markdown(made)
    before, *rest = text.split("<details>\n<summary>Show ours</summary>\n\n<div")
    assert len(rest) == folded == text.count("</details>")
    assert (code in before) != folded
    assert "show(RadixCache.lock)" in before, "only the output is folded"
    fold_ours(made)
    assert [cell.metadata.get("jupyter", {}).get("outputs_hidden", False) for cell in made.cells] == [0, 0, folded]


def test_no_page_prints_what_it_asks_for() -> None:
    # The first chapter asks for nothing.
    for path in sorted((ROOT / "notebooks").glob("*.ipynb"))[1:]:
        number = int(path.name[:2])
        text = as_markdown(nbformat.read(path, as_version=4))
        seen = re.sub(r"<details>\n<summary>Show ours</summary>.*?</details>", "", text, flags=re.DOTALL)
        for task in load_table().chapters[number].tasks:
            for stub in task.stubs:
                printed = rf"^`{stub.path}`, line \d+\n\n(?:<div.*>\n\n)?```python\n(?:@.*\n)*def {stub.last_name}\("
                assert not re.search(printed, seen, re.MULTILINE), f"{path.name}: {task.id} {stub.name}"


def test_tags_of_a_cell_are_not_shown() -> None:
    made = read_chapter(CHAPTER.replace("```python\n", '```python tags=["measured"]\n'))
    assert made.cells[1].metadata.tags == ["measured"]
    assert "measured" not in as_markdown(made)


def chapter(path: str | None, *below: Any, text: str = CHAPTER) -> dict[str, Any]:
    return {"Chapter": {"path": path, "content": text, "sub_items": list(below)}}


def test_preprocess_reaches_nested_chapters_and_leaves_others_alone(tmp_path: Path) -> None:
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook(result(text__plain="deep")), tmp_path / "notebooks" / "01-b.ipynb")
    book = {"items": ["Separator", {"PartTitle": "Part"}, chapter(None), chapter("00-a.md", chapter("01-b.md"))]}
    first, second = preprocess({"root": str(tmp_path)}, book)["items"][2:]
    assert first["Chapter"]["content"] == second["Chapter"]["content"] == CHAPTER
    assert "deep" in second["Chapter"]["sub_items"][0]["Chapter"]["content"]


def test_the_introduction_of_a_part_comes_after_its_title(tmp_path: Path) -> None:
    (tmp_path / "chapters").mkdir()
    (tmp_path / "chapters" / "part-2.md").write_text("# Part II\n\nMany.\n")
    book = {"items": [{"PartTitle": "One"}, chapter("01-a.md"), {"PartTitle": "Many"}, chapter("02-b.md")]}
    made = preprocess({"root": str(tmp_path)}, book)["items"]
    assert len(made) == 5
    assert made[3]["Chapter"]["content"] == "# Part II\n\nMany.\n"
    assert made[3]["Chapter"]["number"] is None


def test_only_the_html_renderer_is_supported() -> None:
    assert main(["preprocess", "supports", "html"]) == 0
    assert main(["preprocess", "supports", "markdown"]) == 1


def preprocessed(tmp_path: Path, text: str) -> subprocess.CompletedProcess[str]:
    given = json.dumps([{"root": str(tmp_path)}, {"items": [chapter("00-a.md", text=text)]}])
    command = [sys.executable, "-m", "tools.mdbook", "preprocess"]
    return subprocess.run(command, input=given, capture_output=True, text=True, check=False, timeout=60, cwd=ROOT)


def test_the_preprocessor_reads_and_writes_json(tmp_path: Path) -> None:
    done = preprocessed(tmp_path, CHAPTER)
    assert json.loads(done.stdout) == {"items": [chapter("00-a.md")]}


def test_a_formula_that_cannot_be_converted_is_named_with_its_chapter(tmp_path: Path) -> None:
    done = preprocessed(tmp_path, CHAPTER + "\n$\\nonsense x$\n")
    assert done.returncode == 1
    assert done.stderr.startswith("00-a: the formula '\\\\nonsense x'")


# -- whole books, with mdBook itself ---------------------------------------------------------------------------------

BOOK = """
[book]
src = "chapters"
[build]
create-missing = false
[preprocessor.outputs]
command = "python -m tools.mdbook preprocess"
"""


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A book of one sound chapter."""
    for name in ("chapters", "notebooks", "tests"):
        (tmp_path / name).mkdir()
    (tmp_path / "book.toml").write_text(BOOK)
    (tmp_path / "chapters" / "SUMMARY.md").write_text("# Summary\n\n[A](00-a.md)\n\n")
    (tmp_path / "chapters" / "00-a.md").write_text(CHAPTER)
    nbformat.write(notebook(result(text__plain="forty-two")), tmp_path / "notebooks" / "00-a.ipynb")
    return tmp_path


def prose(book: Path, text: str) -> None:
    """Add to the chapter what needs no run."""
    (book / "chapters" / "00-a.md").write_text(CHAPTER + text)
    made = notebook(result(text__plain="forty-two"))
    made.cells[3:] = read_chapter(CHAPTER + text).cells[2:]
    nbformat.write(made, book / "notebooks" / "00-a.ipynb")


@pytest.mark.needs("mdbook")
def test_a_sound_book_is_built(book: Path) -> None:
    prose(book, "\n[above](#a-chapter), `tests/`, [mdBook](https://rust-lang.github.io/mdBook/), $n^2$, `x --a-b`\n")
    assert build(book, book / "site") == 0
    page = (book / "site" / "00-a.html").read_text()
    assert "forty-two" in page
    assert "<msup><mi>n</mi><mn>2</mn></msup>" in page
    assert '<code>x <span class="option">--a-b</span></code>' in page


BROKEN = """
{{#include ../no-such-file.py}}

[there](01-b.md) [there](#nowhere) ![picture](x.png) ![picture](https://example.org/x.png) `tests/test_gone.py`
"""


@pytest.mark.needs("mdbook")
def test_a_picture_is_on_its_page_and_not_in_the_index_of_the_search(book: Path) -> None:
    drawn = result(image__svg_xml="<svg><text>wordinpicture</text></svg>", text__plain="x")
    drawn.data = {"image/svg+xml": drawn.data["image/svg_xml"], "text/plain": "x"}
    nbformat.write(notebook(drawn), book / "notebooks" / "00-a.ipynb")
    assert build(book, book / "site") == 0
    for page in ("00-a.html", "print.html"):
        assert "<text>wordinpicture</text>" in (book / "site" / page).read_text()
    index = next((book / "site").glob("searchindex*.js")).read_text()
    assert "so on" in index
    assert "wordinpicture" not in index


@pytest.mark.needs("mdbook")
def test_what_is_not_there_fails_the_build(book: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prose(book, BROKEN)
    shutil.copy(book / "chapters" / "00-a.md", book / "chapters" / "01-c.md")
    assert build(book, book / "site") == 1
    told = capfd.readouterr().err
    for problem in (
        "mdBook warns about the book",
        "chapters/00-a.md: the link to 01-b.md is dead",
        "00-a.html: the link to #nowhere is dead: that page has no such heading",
        "00-a.html: the link to x.png is dead",
        "https://example.org/x.png is loaded from the network",
        "chapters/00-a.md: there is no tests/test_gone.py",
        "chapters/01-c.md: not in SUMMARY.md",
    ):
        assert problem in told


@pytest.mark.needs("mdbook")
def test_cells_without_their_output_fail_the_build(book: Path, capfd: pytest.CaptureFixture[str]) -> None:
    shutil.copy(book / "chapters" / "00-a.md", book / "chapters" / "01-b.md")
    (book / "chapters" / "SUMMARY.md").write_text("# Summary\n\n[A](00-a.md)\n\n- [B](01-b.md)\n")
    (book / "chapters" / "00-a.md").write_text(CHAPTER.replace("f()", "g()"))
    assert build(book, book / "site") == 1
    told = capfd.readouterr().err
    assert "notebooks/00-a.ipynb: cell 2 differs from the chapter: 'f()'" in told
    assert "chapters/01-b.md: no notebook" in told
    assert "forty-two" not in (book / "site" / "00-a.html").read_text()


@pytest.mark.needs("mdbook")
def test_a_chapter_that_is_listed_and_missing_fails_the_build(book: Path) -> None:
    (book / "chapters" / "SUMMARY.md").write_text("# Summary\n\n[A](00-a.md)\n\n- [C](02-c.md)\n")
    assert build(book, book / "site") != 0


@pytest.mark.parametrize(("message", "status"), [("INFO fine", 0), ("WARN a dead link", 1), ("ERROR gone", 1)])
def test_warnings_of_mdbook_fail_the_build(
    book: Path, monkeypatch: pytest.MonkeyPatch, message: str, status: int
) -> None:
    fake = book / "mdbook"
    fake.write_text(f"#!/bin/sh\nmkdir site && echo > site/index.html && echo '{message}' >&2\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(book / "python"))
    assert build(book, book / "site") == status
