"""Outputs that a notebook must not keep, and results that stand in for a run on a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.tools.book import CHAPTER, code_cells, load, save, shown
from tools.notebooks import check, main
from tools.outputs import refresh_listings


def test_a_notebook_that_was_not_run(book: Path) -> None:
    notebook = load(book)
    code_cells(notebook)[1].execution_count = None
    save(book, notebook)
    assert "not every code cell was executed" in check(book)[0]


def test_a_type_variable_before_a_line_break_is_no_drive(book: Path) -> None:
    notebook = load(book)
    code_cells(notebook)[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="def f() -> T:\n    ...\n")]
    save(book, notebook)
    assert check(book) == []


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("stream", name="stderr", text="Warning!\n"), "writes to stderr"),
        (nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[]), "ends in an error"),
        (nbformat.v4.new_output("stream", name="stdout", text="/home/somebody/model\n"), "/home/somebody/model"),
        (nbformat.v4.new_output("stream", name="stdout", text="in lib/site-packages/torch"), "lib/site-packages/torch"),
        (nbformat.v4.new_output("stream", name="stdout", text="C:\\Users\\somebody\n"), "C:"),
        (nbformat.v4.new_output("stream", name="stdout", text="<f at 0x7f7554aa2520>\n"), "an address"),
        (shown("def f(self):\n    return 2"), "source that the package no longer has"),
        (shown("def g(self):\n    return 1"), "source that the package no longer has"),
        (shown("def f(self):\n    return 1", line=7), "at line 7 of minisgl/part.py, where it is at 2"),
    ],
)
def test_outputs_that_must_not_be_kept(book: Path, output: Any, problem: str) -> None:
    notebook = load(book)
    code_cells(notebook)[0].outputs = [output]
    save(book, notebook)
    assert any(problem in line for line in check(book))


# -- listings ----------------------------------------------------------------------------------------------------------

PART = "class Part:\n    def f(self):\n        return 1\n"


def test_pairing_gives_listings_the_code_and_the_line_of_now(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = code_cells(load(book))[1].outputs
    (book / "minisgl" / "part.py").write_text("import this\n\n\n" + PART.replace("1", "2"))
    assert "the package no longer has" in check(book)[0]
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    assert code_cells(load(book))[1].outputs == [shown("def f(self):\n    return 2", line=5)] != before
    assert check(book) == []


@pytest.mark.parametrize("show", ["show(Part.f)", "for part in (Part,):\n    show(part.f)"])
def test_a_listing_follows_its_code_into_another_file(book: Path, show: str) -> None:
    (book / "minisgl" / "part.py").write_text("class Other:\n    def f(self):\n        return 3\n")
    (book / "minisgl" / "new.py").write_text(f"import this\n{PART}")
    notebook = nbformat.v4.new_notebook()
    imports = nbformat.v4.new_code_cell("from minisgl.new import Part")
    notebook.cells = [imports, nbformat.v4.new_code_cell(show, outputs=[shown("def f(self):\n    return 1")])]
    refresh_listings(notebook, book)
    found = "show(Part.f)" in show
    path, value, line = ("new", 1, 3) if found else ("part", 3, 2)
    expected = f"`minisgl/{path}.py`, line {line}\n\n```python\ndef f(self):\n    return {value}\n```"
    assert notebook.cells[1].outputs[0].data == {"text/markdown": expected, "text/plain": expected}


@pytest.mark.parametrize(
    ("part", "problem"),
    [
        ("class Part:\n    pass\n", "the package no longer has"),
        (f"import this\n{PART}\n{PART}", "where it is at 3 and 7"),
    ],
)
def test_a_listing_whose_code_is_not_there_or_there_twice_must_be_run_again(
    book: Path, monkeypatch: pytest.MonkeyPatch, part: str, problem: str
) -> None:
    before = load(book)
    (book / "minisgl" / "part.py").write_text(part)
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    assert load(book) == before
    assert problem in check(book)[0]


# -- results that were kept --------------------------------------------------------------------------------------------


def marked(live: bool) -> Any:
    """What `minisgl.book.measured` displays."""
    mark = {"name": "kernels", "live": live, "origin": "No CUDA device here."}
    return nbformat.v4.new_output("display_data", {"text/plain": "words"}, metadata={"minisgl.measured": mark})


@pytest.mark.parametrize("live", [False, True])
@pytest.mark.parametrize(("count", "status"), [(0, 0), (1, 0), (2, 1)])
def test_kept_results_are_counted_and_told(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, live: bool, count: int, status: int
) -> None:
    """Those of a GPU, too: where there is none they are kept results."""
    notebook = load(book)
    code_cells(notebook)[0].outputs = [marked(live)] * count
    save(book, notebook)
    monkeypatch.chdir(book)
    assert main(["check"]) == status
    told = capsys.readouterr().out
    assert told.count("'answer = 40 + 2\\nprint(answer)' shows kernels.json: No CUDA device here.") == count
    assert f"{count} outputs are kept results wherever there is no GPU; tests/kept-results-budget.txt allows 1" in told
    assert ("2 kept results are more than the 1 of tests/kept-results-budget.txt" in told) == (status == 1)


def test_a_measurement_that_is_not_shown(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chapter = book / "chapters" / "00-a-chapter.md"
    chapter.write_text(CHAPTER.replace("print(answer)", 'm = measured(\n    "kernels", run\n)'))
    monkeypatch.chdir(book)
    main(["pair"])
    notebook = load(book)
    code_cells(notebook)[0].execution_count = 2
    save(book, notebook)
    assert "measured('kernels') is not shown" in check(book)[0]
    code_cells(notebook)[1].outputs = [marked(live=False)]
    save(book, notebook)
    assert check(book) == []
