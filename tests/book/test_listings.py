from __future__ import annotations

import inspect
import re
from pathlib import Path
from xml.etree import ElementTree

from minisgl.attention.triton.tiles import softmax_step
from minisgl.book import chapter_map, show, table
from minisgl.book.course_table import load_table
from minisgl.table import RunningTable


def test_show_gives_file_line_and_the_source_that_runs() -> None:
    listing = show(RunningTable.admit).text
    heading, _, code = listing.partition("\n\n")
    lines, first = inspect.getsourcelines(RunningTable.admit)
    assert heading == f"`minisgl/table.py`, line {first}"
    assert code.startswith("```python\ndef admit(")
    assert code.endswith("\n```")
    assert [line.strip() for line in code.splitlines()[1:-1]] == [line.strip() for line in lines]


def test_show_takes_a_class() -> None:
    listing = show(RunningTable)
    assert "```python\nclass RunningTable" in listing.text == repr(listing)
    place, before, *_, last = listing._repr_markdown_().split("\n\n")
    assert place.startswith("`minisgl/table.py`, line "), "what JupyterLab shows of a folded output"
    assert (before, last) == ('<div style="font-family:monospace; margin-bottom:1em">', "</div>")


def test_show_takes_a_triton_kernel() -> None:
    """Which is an object of Triton's, compiled or interpreted."""
    listing = show(softmax_step).text
    assert listing.startswith("`minisgl/attention/triton/tiles.py`, line ")
    assert "```python\n@triton.jit\ndef softmax_step(" in listing


def test_show_names_no_directory_of_this_machine() -> None:
    assert str(Path.home()) not in show(RunningTable).text
    assert show(test_show_takes_a_class).text.startswith(("`tests/book/test_listings.py`", "`test_listings.py`"))


def test_table_aligns_numbers_and_escapes_what_would_end_a_cell() -> None:
    made = table(["token", "ms"], [("`<|end|>`", 1.234), ("two\nlines", 10.0)])
    assert made.text.splitlines() == [
        "| token | ms |",
        "| --- | ---: |",
        "| `<\\|end\\|>` | 1.23 |",
        "| two lines | 10.00 |",
    ]
    assert made._repr_markdown_() == repr(made) == made.text


def test_columns_of_numbers_that_others_wrote_are_aligned_too() -> None:
    rows = [(1, "2,621", "–", "76%", "1e-06", "–", "5 µs"), (2, "−3", "18.5", "", "2.5", "", "6 µs")]
    assert table(list("abcdefg"), rows).text.splitlines()[1] == "| ---: | ---: | ---: | ---: | ---: | --- | --- |"


def test_chapter_map_has_a_row_a_concept_in_the_order_of_the_chapters() -> None:
    header, _, *rows = repr(chapter_map()).splitlines()
    assert header == "| chapter | concept | module | test |"
    numbers = [int(re.split("[|, ]+", row)[1]) for row in rows]
    assert numbers == sorted(numbers)
    assert len(rows) == len(set(rows)) == sum(len(each.concepts) for each in load_table().chapters.values())
    modules = "`minisgl.kvcache.sizing`, `minisgl.engine.memory`"
    test = "`tests/kvcache/test_sizing.py::test_pages_from_peak`"
    assert f"| 4, 11 | KV pages by peak memory | {modules} | {test} |" in rows


def test_chapter_map_says_the_same_in_a_notebook() -> None:
    drawn = ElementTree.fromstring(chapter_map()._repr_html_().replace("<wbr>", "").replace("<br>", ", "))
    written = [re.split(r" *\| *", row)[1:-1] for row in repr(chapter_map()).replace("`", "").splitlines()]
    assert [["".join(cell.itertext()) for cell in row] for row in drawn.iter("tr")] == [written[0], *written[2:]]
