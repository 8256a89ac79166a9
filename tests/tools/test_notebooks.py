from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.tools.book import CHAPTER, code_cells, load, save
from tools.notebooks import check, main, run


def test_a_sound_pair_passes(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert check(book) == []
    monkeypatch.chdir(book)
    assert main(["check"]) == 0


def test_nothing_to_compare_is_a_failure(tmp_path: Path) -> None:
    assert "nothing to compare" in check(tmp_path)[0]


def test_an_edited_chapter(book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = book / "chapters" / "00-a-chapter.md"
    path.write_text(CHAPTER.replace("40 + 2", "41 + 1"))
    assert check(book) == [
        "notebooks/00-a-chapter.ipynb: cell 2 differs from the chapter: 'answer = 40 + 2\\nprint(answer)'"
    ]
    monkeypatch.chdir(book)
    assert main(["check"]) == 1
    assert "make pair" in capsys.readouterr().out


def test_a_lost_tag(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.replace(' tags=["measured"]', ""))
    assert "cell 3 differs" in check(book)[0]


def test_a_cell_more(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER + "\n```python\n1\n```\n")
    assert "5 cells, the chapter has 6" in check(book)[0]


def test_a_chapter_that_a_save_in_jupyterlab_would_rewrite(book: Path) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.rstrip("\n"))
    assert "saving it in JupyterLab would change" in check(book)[0]


def test_missing_and_surplus_notebooks(book: Path) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    path.rename(path.with_name("01-other.ipynb"))
    assert check(book) == ["notebooks/01-other.ipynb: no such chapter", "chapters/00-a-chapter.md: no notebook"]


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


def test_a_copy_is_run_into_another_folder(
    book: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    text = CHAPTER.replace("print(answer)", "import os; print(os.getcwd())")
    (book / "chapters" / "00-a-chapter.md").write_text(text)
    monkeypatch.chdir(book)
    before, folder = path.read_bytes(), tmp_path / "on" / "a-gpu"
    assert main(["run", "00", "--into", str(folder)]) == 0
    assert path.read_bytes() == before
    (copy,) = folder.iterdir()
    assert str(path.parent.resolve()) in copy.read_text()
    with pytest.raises(SystemExit):
        main(["pair", "--into", str(folder)])
    assert "--into goes with run" in capsys.readouterr().err


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


def test_run_reports_the_cell_that_fails_keeps_the_notebook_and_goes_on(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    before = path.read_bytes()
    (book / "chapters" / "00-a-chapter.md").write_text("# A\n\n```python\nassert 1 == 2\n```\n")
    monkeypatch.chdir(book)
    (book / "chapters" / "01-another.md").write_text("# B\n\n```python\nprint(6 * 7)\n```\n")
    assert main(["run"]) == 1
    assert "assert 1 == 2" in capsys.readouterr().err
    assert path.read_bytes() == before
    assert "42" in (book / "notebooks" / "01-another.ipynb").read_text()


def test_commands_take_beginnings_of_names(
    book: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(book)
    assert main(["pair", "00"]) == 0
    with pytest.raises(SystemExit, match="no chapter's name begins with '01'"):
        main(["run", "01"])
    assert capsys.readouterr().out == ""


def test_after_a_change_of_prose_pairing_is_enough(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    before = path.read_bytes()
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    assert path.read_bytes() == before
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.replace("What is it?", "What?"))
    assert "cell 0 differs" in check(book)[0]
    assert main(["pair"]) == 0
    assert check(book) == []
    assert path.read_bytes() != before
    assert [cell.execution_count for cell in code_cells(load(book))] == [2, 3]


def test_what_jupyterlab_saves_is_paired_again(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It adds widgets, which only the kernel that made them can show, and metadata."""
    path = book / "notebooks" / "00-a-chapter.ipynb"
    before = path.read_bytes()
    saved = load(book)
    code_cells(saved)[1].outputs[0].data["application/vnd.jupyter.widget-view+json"] = {"model_id": "1f"}
    code_cells(saved)[0].metadata["trusted"] = True
    saved.metadata["language_info"]["version"] = "3.11.7"
    save(book, saved)
    assert check(book) == ["notebooks/00-a-chapter.ipynb: is not written as the chapter generates it"]
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    assert path.read_bytes() == before


def test_pairing_does_not_keep_the_output_of_other_code(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (book / "chapters" / "00-a-chapter.md").write_text(CHAPTER.replace("40 + 2", "41 + 1"))
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    changed, same = code_cells(load(book))
    assert (changed.outputs, changed.execution_count) == ([], None)
    assert same.execution_count == 3
    assert "not every code cell was executed" in check(book)[0]


def test_a_notebook_that_was_saved_by_something_else(book: Path) -> None:
    path = book / "notebooks" / "00-a-chapter.ipynb"
    text = path.read_text()
    for changed in (
        text.replace("Python 3 (ipykernel)", "my kernel"),
        text.rstrip("\n"),
        text.replace('"id": "', '"id": "x'),
    ):
        path.write_text(changed)
        assert check(book) == ["notebooks/00-a-chapter.ipynb: is not written as the chapter generates it"]


def test_times_of_files_do_not_matter(book: Path) -> None:
    for path, time in (("chapters/00-a-chapter.md", 2), ("notebooks/00-a-chapter.ipynb", 1)):
        os.utime(book / path, (time, time))
    assert check(book) == []


def test_a_folded_answer_that_a_code_cell_cuts(book: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = CHAPTER.replace("Because.", "```python\n1\n```")
    (book / "chapters" / "00-a-chapter.md").write_text(text)
    monkeypatch.chdir(book)
    assert main(["pair"]) == 0
    assert "folds an answer that it does not end" in check(book)[0]
