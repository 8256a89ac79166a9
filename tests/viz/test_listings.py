from __future__ import annotations

import inspect
from pathlib import Path

from minisgl.attention.triton_tiles import softmax_step
from minisgl.core import Registry, RunningTable
from minisgl.viz import chapter_map, show, table


def test_show_gives_file_line_and_the_source_that_runs() -> None:
    listing = show(RunningTable.admit).text
    heading, _, code = listing.partition("\n\n")
    lines, first = inspect.getsourcelines(RunningTable.admit)
    assert heading == f"`minisgl/core/table.py`, line {first}"
    assert code.startswith("```python\ndef admit(")
    assert code.endswith("\n```")
    assert [line.strip() for line in code.splitlines()[1:-1]] == [line.strip() for line in lines]


def test_show_takes_a_class() -> None:
    assert "```python\nclass Registry(" in show(Registry).text


def test_show_takes_a_triton_kernel() -> None:
    """Which is an object of Triton's, compiled or interpreted."""
    listing = show(softmax_step).text
    assert listing.startswith("`minisgl/attention/triton_tiles.py`, line ")
    assert "```python\n@triton.jit\ndef softmax_step(" in listing


def test_show_names_no_directory_of_this_machine() -> None:
    assert str(Path.home()) not in show(Registry).text
    assert show(test_show_takes_a_class).text.startswith(("`tests/viz/test_listings.py`", "`test_listings.py`"))


def test_table_aligns_numbers_and_escapes_what_would_end_a_cell() -> None:
    made = table(["token", "ms"], [("`<|end|>`", 1.234), ("two\nlines", 10.0)])
    assert made.text.splitlines() == [
        "| token | ms |",
        "| --- | ---: |",
        "| `<\\|end\\|>` | 1.23 |",
        "| two lines | 10.00 |",
    ]
    assert made._repr_markdown_() == repr(made) == made.text


def test_chapter_map_reads_the_first_lines_of_docstrings(tmp_path: Path) -> None:
    package = tmp_path / "pack"
    (package / "late").mkdir(parents=True)
    (package / "late" / "__init__.py").write_text('"""Chapters 8, 9 and 10: later things, e.g. these."""')
    (package / "early.py").write_text(
        '"""Chapter 2, second half: one thing. Chapter 3: another.\n\nChapter 5: not this."""'
    )
    for chapter in range(11, 20):
        (package / f"m{30 - chapter}.py").write_text(f'"""Chapter {chapter}: thing."""')
    (package / "none.py").write_text('"""Of no chapter."""')
    (package / "empty.py").write_text("")
    assert chapter_map(package).text.splitlines()[2:] == [
        "| 2 | one thing | `pack.early` |",
        "| 3 | another | `pack.early` |",
        "| 8, 9 and 10 | later things, e.g. these | `pack.late` |",
        *(f"| {chapter} | thing | `pack.m{30 - chapter}` |" for chapter in range(11, 20)),
    ]


def test_chapter_map_knows_this_package() -> None:
    text = chapter_map().text
    for module in ("core", "models", "engine", "kvcache.radix", "scheduler"):
        assert f"`minisgl.{module}`" in text
