from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

from tools.notebooks import check, main, read_chapter, run

WIDGET = "application/vnd.jupyter.widget-view+json"
CHAPTER = """# A chapter

What is it?

```python
answer = 40 + 2
print(answer)
```

```python tags=["measured"]
answer
```

~~~bash
make nothing
~~~

<details><summary>Why?</summary>

Because.

</details>
"""


def listing(code: str) -> str:
    return f"`minisgl/part.py`, line 7\n\n```python\n{code}\n```"


@pytest.fixture
def book(tmp_path: Path) -> Path:
    """A book of one chapter, whose notebook has the outputs that a run would leave."""
    for name in ("chapters", "notebooks", "minisgl"):
        (tmp_path / name).mkdir()
    (tmp_path / "minisgl" / "part.py").write_text("class Part:\n    def f(self):\n        return 1\n")
    chapter = tmp_path / "chapters" / "00-a-chapter.md"
    chapter.write_text(CHAPTER)
    notebook = read_chapter(chapter)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(code, start=1):
        cell.execution_count = count
    code[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="42\n")]
    code[1].outputs = [shown("def f(self):\n    return 1")]
    save(tmp_path, notebook)
    return tmp_path


def shown(code: str) -> Any:
    return nbformat.v4.new_output("execute_result", {"text/markdown": listing(code)}, execution_count=2)


def load(root: Path) -> Any:
    return nbformat.read(root / "notebooks" / "00-a-chapter.ipynb", as_version=4)


def save(root: Path, notebook: Any) -> None:
    nbformat.write(notebook, root / "notebooks" / "00-a-chapter.ipynb")


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_a_sound_pair_passes(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(book) == []
    monkeypatch.chdir(book)
    assert main(["check"]) == 0


def test_a_type_variable_before_a_line_break_is_no_drive(book: Path) -> None:
    notebook = load(book)
    code_cells(notebook)[0].outputs = [nbformat.v4.new_output("stream", name="stdout", text="def f() -> T:\n    ...\n")]
    save(book, notebook)
    assert check(book) == []


def test_nothing_to_compare_is_a_failure(tmp_path: Path) -> None:
    assert "nothing to compare" in check(tmp_path)[0]


def test_an_edited_chapter(book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = book / "chapters" / "00-a-chapter.md"
    path.write_text(CHAPTER.replace("40 + 2", "41 + 1"))
    assert check(book) == [
        "notebooks/00-a-chapter.ipynb: cell 1 differs from the chapter: 'answer = 40 + 2\\nprint(answer)'"
    ]
    monkeypatch.chdir(book)
    assert main(["check"]) == 1
    assert "make pairs" in capsys.readouterr().out


def test_a_lost_tag(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.replace(' tags=["measured"]', ""))
    assert "cell 2 differs" in check(book)[0]


def test_a_cell_more(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER + "\n```python\n1\n```\n")
    assert "4 cells, the chapter has 5" in check(book)[0]


def test_a_chapter_that_a_save_in_jupyterlab_would_rewrite(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.rstrip("\n"))
    assert "saving it in JupyterLab would change" in check(book)[0]


def test_missing_and_surplus_notebooks(book: Path) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    path.rename(path.with_name("01-other.ipynb"))
    assert check(book) == ["notebooks/01-other.ipynb: no such chapter", "chapters/00-a-chapter.md: no notebook"]


def test_a_notebook_that_was_not_run(book: Path) -> None:
    notebook = load(book)
    code_cells(notebook)[1].execution_count = None
    save(book, notebook)
    assert "not every code cell was executed" in check(book)[0]


@pytest.mark.parametrize(
    ("output", "problem"),
    [
        (nbformat.v4.new_output("stream", name="stderr", text="Warning!\n"), "writes to stderr"),
        (nbformat.v4.new_output("error", ename="E", evalue="v", traceback=[]), "ends in an error"),
        (nbformat.v4.new_output("stream", name="stdout", text="/home/somebody/model\n"), "/home/somebody/model"),
        (nbformat.v4.new_output("stream", name="stdout", text="C:\\Users\\somebody\n"), "C:"),
        (nbformat.v4.new_output("display_data", {WIDGET: {"model_id": "1f"}, "text/plain": "a slider"}), "a widget"),
        (shown("def f(self):\n    return 2"), "source that the package no longer has"),
        (shown("def g(self):\n    return 1"), "source that the package no longer has"),
    ],
)
def test_outputs_that_must_not_be_kept(book: Path, output: Any, problem: str) -> None:
    notebook = load(book)
    code_cells(notebook)[0].outputs = [output]
    save(book, notebook)
    assert any(problem in line for line in check(book))


def test_run_writes_the_same_notebook_every_time(book: Path) -> None:
    chapter, path = book / "chapters" / "00-a-chapter.md", book / "notebooks" / "00-a-chapter.ipynb"
    run(chapter, path)
    first = path.read_bytes()
    notebook = load(book)
    assert [cell.outputs[0].get("text") or cell.outputs[0].data["text/plain"] for cell in code_cells(notebook)] == [
        "42\n",
        "42",
    ]
    assert notebook.metadata.kernelspec.name == "python3"
    assert "iopub" not in first.decode()
    assert check(book) == []
    run(chapter, path)
    assert path.read_bytes() == first


@pytest.mark.needs("ipywidgets")
def test_of_a_widget_the_other_forms_are_kept(book: Path) -> None:
    chapter, path = book / "chapters" / "00-a-chapter.md", book / "notebooks" / "00-a-chapter.ipynb"
    chapter.write_text(CHAPTER.replace("print(answer)", "from ipywidgets import IntSlider\n\nIntSlider(answer)"))
    run(chapter, path)
    first = path.read_bytes()
    assert code_cells(load(book))[0].outputs[0].data == {"text/plain": "IntSlider(value=42)"}
    assert check(book) == []
    run(chapter, path)
    assert path.read_bytes() == first


def test_run_reports_the_cell_that_fails_and_keeps_the_notebook(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    before = path.read_bytes()
    (book / "chapters" / "00-a-chapter.md").write_text("# A\n\n```python\nassert 1 == 2\n```\n")
    monkeypatch.chdir(book)
    assert main(["run"]) == 1
    assert "assert 1 == 2" in capsys.readouterr().err
    assert path.read_bytes() == before


def test_run_takes_beginnings_of_names(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(book)
    assert main(["run", "01"]) == 0
    assert capsys.readouterr().out == ""
