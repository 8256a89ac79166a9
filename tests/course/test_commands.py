"""The commands as a student meets them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from minisgl.book.__main__ import main
from minisgl.book.course_table import load_table
from minisgl.book.starters import Sources, repository
from tests.course.tasks import task_with

SPLIT = 'raise NotImplementedError("Chapter 6, task 5: RadixCache._split")'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A starter of chapter 6."""
    assert main(["start", "6", str(tmp_path / "six")]) == 0
    return tmp_path / "six"


def solve(folder: Path, chapter: int) -> None:
    """Put the solution of a chapter where it belongs."""
    sources = Sources(repository(), load_table())
    for path, text in sources.modules_of(sources.table.chapter(chapter).tasks, ()).items():
        (folder / path).write_text(text, encoding="utf-8")


def change(folder: Path, right: str, wrong: str) -> None:
    """Put a mistake into the radix tree."""
    file = folder / "minisgl/kvcache/radix.py"
    text = file.read_text(encoding="utf-8")
    assert text.count(right) == 1
    file.write_text(text.replace(right, wrong), encoding="utf-8")


def test_list_names_every_task(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    output = capsys.readouterr().out
    for chapter in load_table().chapters.values():
        assert f"{chapter.number:2}  {chapter.title}" in output
        assert all(task.title in output for task in chapter.tasks)


def test_a_starter_is_what_a_student_needs(folder: Path) -> None:
    here = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    assert {"README.md", "pyproject.toml", "chapters/06-the-radix-tree.md", "notebooks/06-the-radix-tree.ipynb"} <= here
    assert SPLIT in (folder / "minisgl/kvcache/radix.py").read_text(encoding="utf-8")
    assert "5. Split an edge" in (folder / "README.md").read_text(encoding="utf-8")


def test_check_of_a_starter_says_what_to_write_first(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert main(["check", "6", str(folder)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"task 1 .* not written yet\n", output)
    assert re.search(r"task 5 .* needs task 4\n", output)
    assert "Next, task 1" in output
    assert re.search(r"write PrefixCache\.\w+ in .*six/minisgl/book/toy.py, line \d+", output)
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before, "check writes nothing"


def test_check_of_a_solution_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["start", "1", str(tmp_path / "one")]) == 0
    solve(tmp_path / "one", 1)
    assert main(["check", "1", str(tmp_path / "one")]) == 0
    assert "All tasks are done." in capsys.readouterr().out


def test_check_shows_the_first_failure_of_a_wrong_answer(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solve(folder, 6)
    change(folder, "lock_count=node.lock_count,", "")
    (folder / "tests/kvcache/test_radix.py").write_text("")  # the check brings its own tests along
    assert main(["check", "6", str(folder)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"task 5 .* FAILED \(1 of 13 tests\)", output)
    test = "tests/kvcache/test_radix.py::test_both_halves_of_a_split_have_the_locks_of_the_whole"
    assert f"The first failure is {test}" in output
    assert f"cd {folder} && python -m pytest {test}" in output


def test_a_task_that_fails_behind_another_names_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    solve(folder, 6)
    change(folder, "self._clock += 1", "pass")
    assert main(["check", "6", str(folder)]) == 1
    output = capsys.readouterr().out
    assert re.search(r"task 4 .* FAILED \(\d+ of \d+ tests\)\n", output)
    assert re.search(r"task 7 .* FAILED \(\d+ of \d+ tests; task 4 first\)\n", output)


def test_a_loop_without_an_end_ends_the_check_and_is_shown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """After the time of one test, not of all that run into it."""
    solve(folder, 6)
    change(folder, "            node.lock_count -= 1\n", "            while True:\n                pass\n")
    assert main(["check", "6", str(folder), "--timeout", "5"]) == 1
    output = capsys.readouterr().out
    assert re.search(r"task 5 .* passed", output)
    assert re.search(r"task 6 .* FAILED", output)
    assert re.search(r"task 7 .* not run", output)
    assert "took longer than 5 seconds, and was stopped: look for a loop, or an await, that never ends" in output
    assert re.search(r"in your RadixCache.unlock, line \d+ of it: (while True:|pass)", output)


def test_a_conftest_of_the_readers_own_is_told_to_count_for_nothing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "minisgl/conftest.py").write_text("raise RuntimeError")
    (folder / "conftest.py").write_text("raise RuntimeError")
    assert main(["check", "6", str(folder)]) == 1
    output = capsys.readouterr().out
    assert f"{folder}/minisgl/conftest.py counts for nothing here" in output
    assert f"{folder}/conftest.py counts for nothing here" in output
    assert "Next, task 1" in output


def test_a_package_that_ends_the_process_is_told_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "minisgl/request.py").write_text("import os\nos._exit(0)\n")
    assert main(["check", "6", str(folder)]) == 2
    assert "the tests ended without a result: something ends the process" in capsys.readouterr().err


def test_a_module_that_cannot_be_imported_fails_its_tests(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "minisgl/kvcache/radix.py").write_text("def broken(:\n")
    assert main(["check", "6", str(folder)]) == 1
    assert "SyntaxError" in capsys.readouterr().out


def test_a_folder_of_another_chapter_is_told_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "8", str(folder)]) == 2
    assert "has no chapters/08-….md, so it is not of chapter 8; `python -m" in capsys.readouterr().err
    (folder / "minisgl/kvcache/radix.py").unlink()
    assert main(["check", "6", str(folder)]) == 2
    assert "has no minisgl/kvcache/radix.py, so it is not of chapter 6; `python -m" in capsys.readouterr().err


def test_diff_shows_the_solution(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", "9"]) == 0
    output = capsys.readouterr().out
    assert "--- a/minisgl/scheduler/scheduler.py" in output
    (message,) = (each for each in task_with("Scheduler._preempt").messages if each.endswith("Scheduler._preempt"))
    assert f'-        raise NotImplementedError("{message}")' in output
    assert "+        request.state = RequestState.PREEMPTED" in output


def test_one_task_alone_has_a_hint_a_solution_and_a_difference(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hint", "6.5"]) == 0
    assert len(capsys.readouterr().out) > 20
    for wanted in (["6.5"], ["6", "5"]):
        assert main(["solution", *wanted]) == 0
        solution = capsys.readouterr().out
        assert solution.startswith("# minisgl/kvcache/radix.py: RadixCache._split\ndef _split(")
        assert "def insert" not in solution
    assert main(["diff", "6.5"]) == 0
    assert f"-        {SPLIT}" in capsys.readouterr().out
    assert main(["diff", "6.5", str(folder)]) == 0
    difference = capsys.readouterr().out
    assert main(["diff", "6", "5", str(folder)]) == 0
    assert capsys.readouterr().out == difference
    assert f"-    {SPLIT}" in difference
    assert "RadixCache.insert" not in difference


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["start", "99", "new"], "chapter 99 is not in the course; choose one of 1, 2, 3"),
        (["start", "6", "full"], "full is there already and is not an empty folder; name a new one"),
        (["start", "6", "full/mine.py"], "mine.py is there already"),
        (["start", "6", "full/mine.py/new"], "cannot write"),
        (["check", "6", "full"], "full has no package minisgl/; name the folder that"),
        (["check", "6", "missing"], "missing has no package minisgl/"),
        (["check", "6", "full", "--timeout", "0"], "--timeout is a number of seconds above 0, not 0"),
        (["diff", "99"], "chapter 99 is not in the course"),
        (["diff", "6", "full/mine.py"], "name one task to compare with full/mine.py, such as 6.1"),
        (["diff", "6.4", "full/mine.py"], "has no function RadixCache._walk"),
        (["diff", "6.4", "nothing"], "nothing cannot be read"),
        (["diff", "6", "4", "mine.py", "yours.py"], "one folder or file can be compared, not 2: mine.py yours.py"),
        (["solution", "6"], "'6' names no task; write chapter and number, such as 6.2"),
        (["hint", "6.9"], "chapter 6 has the tasks 6.1 to 6.7, and no 6.9"),
    ],
)
def test_bad_input_is_told_what_to_do(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.py").write_text("work = 1\n")
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    assert [path.name for path in sorted(tmp_path.rglob("*"))] == ["full", "mine.py"]
    assert (tmp_path / "full/mine.py").read_text() == "work = 1\n"


def test_a_package_without_its_first_file_is_told_which_file_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "minisgl/book").mkdir(parents=True)
    assert main(["check", "6", str(tmp_path)]) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path} has no minisgl/__init__.py, without which minisgl/ is no package; copy the file from" in told
