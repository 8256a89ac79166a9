"""Which chapter what belongs to: the table and the imports cover every module and every test."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.course.errors import CourseError
from minisgl.course.sources import Sources, repository
from minisgl.course.table import load_table
from minisgl.course.workspace import package, snapshot, starter, suite_until


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources(repository(), load_table())


def test_every_module_belongs_to_a_chapter_or_to_the_tools(sources: Sources) -> None:
    chapters = {name: sources.chapter_of_module(name) for name in sources.modules}
    assert chapters["minisgl"] == 1
    assert chapters["minisgl.models.decoder"] == 2
    assert chapters["minisgl.models.loader"] == 3
    assert chapters["minisgl.kvcache.radix"] == 6
    assert chapters["minisgl.viz.svg"] is None


def test_no_module_needs_one_of_a_later_chapter(sources: Sources) -> None:
    for name, path in sources.modules.items():
        chapter = sources.chapter_of_module(name)
        if chapter is None or path.endswith("__init__.py"):
            continue
        for imported in sources.needed_imports(path):
            home = sources.home(imported)
            number = None if home is None else sources.chapter_of_module(home)
            assert number is None or number <= chapter, f"{name} of chapter {chapter} imports {imported}"


def test_every_test_belongs_to_a_chapter(sources: Sources) -> None:
    assert len(sources.test_files()) > 60
    assert sources.chapter_of_test("tests/kvcache/test_radix.py") == 6
    assert sources.chapter_of_test("tests/models/test_against_transformers.py") == 4  # by its helper's imports
    assert sources.chapter_of_test("tests/test_llm.py") == 14
    assert sources.chapter_of_test("tests/viz/test_pictures.py") is None


def repository_with(tmp_path: Path, **files: str) -> Sources:
    (tmp_path / "minisgl").mkdir()
    (tmp_path / "tests").mkdir()
    for name, text in {"minisgl/__init__": "", **files}.items():
        (tmp_path / f"{name}.py").write_text(text)
    return Sources(tmp_path, load_table())


def test_a_test_that_belongs_nowhere_is_an_error(tmp_path: Path) -> None:
    sources = repository_with(tmp_path, **{"tests/test_nothing": "import json\n"})
    with pytest.raises(CourseError, match=r"tests/test_nothing.py belongs to no chapter: add it"):
        sources.test_files()


def test_a_module_that_belongs_nowhere_is_an_error(tmp_path: Path) -> None:
    sources = repository_with(tmp_path, **{"minisgl/novel": "", "tests/test_novel": "import minisgl.novel\n"})
    with pytest.raises(CourseError, match=r"minisgl.novel belongs to no chapter: add it"):
        sources.test_files()


def test_a_name_is_of_the_module_that_defines_it(sources: Sources) -> None:
    assert sources.home("minisgl.models.load_model") == "minisgl.models.loader"
    assert sources.home("minisgl.LLM") == "minisgl.llm"
    assert sources.home("minisgl.kvcache.radix") == "minisgl.kvcache.radix"
    assert sources.home("numpy.array") is None


def test_a_starter_differs_from_the_snapshot_in_its_tasks_alone(sources: Sources) -> None:
    for chapter in (each for each in sources.table.chapters.values() if each.tasks):
        begun, done = starter(sources, chapter.number), snapshot(sources, chapter.number)
        differing = {path for path in begun if begun[path] != done[path] and path != "README.md"}
        assert differing == {stub.path for task in chapter.tasks for stub in task.stubs}
        for task in chapter.tasks:
            for stub in task.stubs:
                assert f'NotImplementedError("{task.message(stub)}")' in begun[stub.path]


def test_a_snapshot_is_the_source_itself_but_for_what_comes_later(sources: Sources) -> None:
    files = package(sources, 6, unwritten=7)
    assert files["minisgl/kvcache/radix.py"] == sources.read("minisgl/kvcache/radix.py")
    assert "minisgl/kvcache/block_hash.py" not in files
    assert "load_model" not in package(sources, 2, unwritten=3)["minisgl/models/__init__.py"]
    # Preemption is chapter 9's, in a file of chapter 8's.
    assert "Chapter 9, task 2: Scheduler._preempt" in package(sources, 8, unwritten=9)["minisgl/scheduler/scheduler.py"]


def test_a_package_brings_the_files_that_it_reads(sources: Sources) -> None:
    page = "minisgl/server/ui/index.html"
    assert package(sources, 15, unwritten=16)[page] == sources.read(page)
    assert page not in package(sources, 14, unwritten=15)
    assert sources.data_until(14) == [], "the tools' own files are theirs"


def test_a_workspace_has_the_tests_with_what_they_need(sources: Sources) -> None:
    files = suite_until(sources, 6)
    assert {"tests/kvcache/test_radix.py", "tests/kvcache/__init__.py", "tests/steps.py"} <= set(files)
    assert "tests/kvcache/test_block_hash.py" not in files
    assert "block_hash as" not in files["tests/contracts/test_prefix_cache.py"]
    assert "importlinter" not in files["pyproject.toml"]
