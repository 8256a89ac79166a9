"""The folders that a reader gets: the package as of a chapter, its tests, and the chapter's text."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from minisgl.course.errors import CourseError
from minisgl.course.sources import PACKAGE, Sources
from minisgl.course.stubs import with_stubs, without_later_imports
from minisgl.course.table import Chapter, Task

Files = Mapping[str, str]
"""Text by path, relative to a folder."""


def package(sources: Sources, chapter: int, unwritten: int) -> Files:
    """The package's modules of chapters 1 to ``chapter``.

    Args:
        sources: where they come from.
        chapter: the last one to include.
        unwritten: tasks of this chapter and later ones are stubs.
    """
    return package_with_stubs(sources, chapter, sources.table.tasks_from(unwritten))


def package_with_stubs(sources: Sources, chapter: int, tasks: list[Task]) -> Files:
    """The package's files of chapters 1 to ``chapter``, with the functions of some tasks taken away."""
    messages: dict[str, dict[str, str]] = {}
    for task in tasks:
        for stub in task.stubs:
            messages.setdefault(stub.path, {})[stub.name] = task.message(stub)
    is_there = _is_there(sources, chapter)
    files = {path: sources.read(path) for path in sources.data_until(chapter)}
    for path in sources.modules_until(chapter):
        text = with_stubs(sources.read(path), messages.get(path, {}))
        files[path] = without_later_imports(text, is_there, path.endswith("__init__.py"))
    return files


def suite_until(sources: Sources, chapter: int) -> Files:
    """The tests of chapters 1 to ``chapter``, with the files that they need."""
    paths = {"conftest.py", "tests/skip-budget.txt", *sources.plugins()}
    for path in sources.test_files():
        number = sources.chapter_of_test(path)
        if number is not None and number <= chapter:
            paths.update(sources.needed_by(path))
    is_there = _is_there(sources, chapter)
    return {
        path: without_later_imports(sources.read(path), is_there, False) if path.endswith(".py") else sources.read(path)
        for path in sorted(paths)
    } | {"pyproject.toml": _project(sources, chapter)}


def starter(sources: Sources, chapter: int) -> Files:
    """What a reader begins a chapter with: everything before it is written, its tasks are stubs."""
    sources.table.chapter_with_tasks(chapter)
    files = {**package(sources, chapter, unwritten=chapter), **_surroundings(sources, chapter)}
    return files | {"README.md": _readme_of_starter(sources, chapter)}


def snapshot(sources: Sources, chapter: int) -> Files:
    """The package of chapters 1 to ``chapter``, complete, with their tests."""
    title = sources.table.chapter(chapter).title
    files = {**package(sources, chapter, unwritten=chapter + 1), **_surroundings(sources, chapter)}
    readme = (
        f"# minisgl as of chapter {chapter}, {title}\n\n`python -m pytest` runs the tests of all chapters so far.\n"
    )
    return files | {"README.md": readme}


def write(files: Files, directory: Path) -> None:
    """Write a folder that is not there yet, or is empty.

    Raises:
        CourseError: something is there, or cannot be written. Nothing that was there is changed.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CourseError(f"{directory} is there already and is not an empty folder; name a new one")
    try:
        for path, text in files.items():
            file = directory / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CourseError(f"cannot write {directory}: {error.strerror}; name a folder that can be written") from error


def _is_there(sources: Sources, chapter: int) -> Callable[[str], bool]:
    """Whether what is imported is in the package of chapters 1 to ``chapter``, or of another package."""
    modules = set(sources.modules_until(chapter))

    def is_there(imported: str) -> bool:
        home = sources.home(imported)
        return home is None or sources.modules[home] in modules

    return is_there


def _surroundings(sources: Sources, chapter: int) -> Files:
    paths = ["LICENSE"]
    for folder, suffix in (("chapters", "md"), ("notebooks", "ipynb")):
        found = sorted((sources.root / folder).glob(f"{chapter:02d}-*.{suffix}"))
        paths += [path.relative_to(sources.root).as_posix() for path in found]
    return {**{path: sources.read(path) for path in paths}, **suite_until(sources, chapter)}


def _project(sources: Sources, chapter: int) -> str:
    """The repository's, without the layers of chapters that are not there, and with this chapter's left-out tests."""
    sections = re.split(r"^(?=\[)", sources.read("pyproject.toml"), flags=re.MULTILINE)
    kept = "".join(each for each in sections if not each.startswith(("[tool.importlinter", "[[tool.importlinter")))
    later = [f"--deselect={test}" for test in later_tests(sources, chapter)]
    return kept.replace("--strict-markers", " ".join([*later, "--strict-markers"]))


def later_tests(sources: Sources, chapter: int) -> list[str]:
    """Single tests, ``file::test``, that are in a file of chapters 1 to ``chapter`` but need a later one."""
    stated = [(each.number, test) for each in sources.table.chapters.values() for test in each.tests if "::" in test]
    return [test for number, test in stated if number > chapter]


def _readme_of_starter(sources: Sources, chapter: int) -> str:
    this = sources.table.chapter(chapter)
    lines = [
        f"# Chapter {chapter}: {this.title}",
        "",
        "Everything up to the chapter before is written. These functions are yours; find one by the text of its error,",
        f'such as "{this.tasks[0].message(this.tasks[0].stubs[0])}":',
        "",
    ]
    for task in this.tasks:
        lines.append(f"{task.number}. {task.title}")
        lines += [f"    - `{stub.name}` in `{stub.path}`" for stub in task.stubs]
    lines += [
        "",
        "Their docstrings say what they do, the chapter in `chapters/` says why. To check what you have written, run",
        "this in the book's repository:",
        "",
        f"    python -m minisgl.course check {chapter} PATH-OF-THIS-FOLDER",
        "",
        "Where a test expects an error of a certain kind, the report shows the words that it looks for.",
        "",
        "To run tests by yourself, with a debugger or with prints, in this folder:",
        "",
        f"    python -m pytest {this.tasks[0].tests[0].partition('[')[0]}",
        "",
        f"The package here ends with chapter {chapter}. The notebook needs all of it: open it in the repository.",
    ]
    return "\n".join(lines) + "\n"


def find_package(directory: Path, chapter: Chapter) -> None:
    """Make sure that a folder holds a package in which a chapter's tasks can be written.

    Raises:
        CourseError: it does not.
    """
    if not (directory / PACKAGE / "__init__.py").is_file():
        raise CourseError(
            f"{directory} has no package {PACKAGE}/; name the folder that `python -m minisgl.course start` wrote"
        )
    for task in chapter.tasks:
        for stub in task.stubs:
            if not (directory / stub.path).is_file():
                raise CourseError(
                    f"{directory} has no {stub.path}, so it is not of chapter {chapter.number}; "
                    f"`python -m minisgl.course start {chapter.number} NEW-FOLDER` writes one that is"
                )
