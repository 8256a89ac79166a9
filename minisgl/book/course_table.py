"""The table of the course, ``course.toml``: what each chapter introduces and teaches, and what its reader writes."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.errors import MiniSGLError

TABLE = Path(__file__).with_name("course.toml")


class CourseError(MiniSGLError):
    """A command of the course cannot do what it was asked. The message says what to do instead."""


@dataclass(frozen=True)
class Stub:
    """A function that a reader writes: its module, and its qualified name in it."""

    module: str
    name: str

    @property
    def path(self) -> str:
        """The module's file, relative to the folder that holds the package."""
        return self.module.replace(".", "/") + ".py"


@dataclass(frozen=True)
class Task:
    """Functions that are written together, and the tests that pass once they are.

    Args:
        tests: ``file``, ``file::test``, or ``file::test[parameter]`` for the cases that have this parameter.
    """

    chapter: int  # the task's place; tasks of a chapter count from 1, in the order of the table
    number: int
    title: str  # what is to be done, in a few words
    stubs: tuple[Stub, ...]
    tests: tuple[str, ...]

    def message(self, stub: Stub) -> str:
        """What its stub says when it is called."""
        return f"Chapter {self.chapter}, task {self.number}: {stub.name}"

    @property
    def messages(self) -> list[str]:
        """What its stubs say."""
        return [self.message(stub) for stub in self.stubs]


@dataclass(frozen=True)
class Concept:
    """A part of a serving engine that a chapter teaches."""

    title: str  # its name in the field
    modules: tuple[str, ...]  # that hold it
    test: str  # ``file`` or ``file::test`` that fails without it
    chapters: tuple[int, ...]  # the one that introduces it, and later ones that take it up again


@dataclass(frozen=True)
class Chapter:
    """One chapter."""

    number: int
    title: str
    introduces: tuple[str, ...]  # modules, ``package.module``, and single definitions, ``package.module:Definition``
    concepts: tuple[Concept, ...]  # what it teaches first
    tasks: tuple[Task, ...]  # what its reader writes


@dataclass(frozen=True)
class Table:
    """All chapters by their numbers, in order, and as ``reference`` what no chapter introduces."""

    chapters: Mapping[int, Chapter]
    reference: tuple[str, ...]

    def chapter(self, number: int) -> Chapter:
        """The chapter of that number. Raises `CourseError` if there is none."""
        if number not in self.chapters:
            known = ", ".join(map(str, self.chapters))
            raise CourseError(f"chapter {number} is not in the course; choose one of {known}")
        return self.chapters[number]

    def chapter_with_tasks(self, number: int) -> Chapter:
        """The chapter of that number. Raises `CourseError` if there is none, or if it has no tasks."""
        chapter = self.chapter(number)
        if not chapter.tasks:
            known = ", ".join(str(each.number) for each in self.chapters.values() if each.tasks)
            raise CourseError(f"chapter {number} has no tasks; choose one of {known}")
        return chapter

    def homes(self, module: str, definition: str) -> list[int | None]:
        """The chapters that introduce a definition; None stands for the reference.

        An entry for the definition counts more than one for its module. There should be exactly one.
        """
        entries = [(each.number, entry) for each in self.chapters.values() for entry in each.introduces]
        every: list[tuple[int | None, str]] = [*entries, *((None, entry) for entry in self.reference)]
        exact = [number for number, entry in every if entry == f"{module}:{definition}"]
        return exact or [number for number, entry in every if entry == module]


def load_table(path: Path = TABLE) -> Table:
    """Read the table. Raises `CourseError` if it is not well formed; the message names the entry."""
    raw = tomllib.loads(path.read_text(encoding="utf-8"))
    _only(raw, {"chapter", "reference"}, str(path))
    chapters = [_chapter(entry) for entry in raw.get("chapter", [])]
    numbers = [chapter.number for chapter in chapters]
    if numbers != sorted(set(numbers)):
        raise CourseError(f"{path}: chapters must be in order, each once; they are {numbers}")
    return Table(dict(zip(numbers, chapters, strict=True)), tuple(raw.get("reference", ())))


def _chapter(entry: dict[str, Any]) -> Chapter:
    number, title = entry["number"], entry["title"]
    _only(entry, {"number", "title", "introduces", "concept", "task"}, f"chapter {number}")
    concepts = tuple(_concept(number, concept) for concept in entry.get("concept", []))
    tasks = tuple(_task(number, place, task) for place, task in enumerate(entry.get("task", []), start=1))
    return Chapter(number, title, tuple(entry.get("introduces", ())), concepts, tasks)


def _concept(chapter: int, entry: dict[str, Any]) -> Concept:
    title = entry["title"]
    _only(entry, {"title", "modules", "test", "again"}, f"chapter {chapter}, {title}")
    if not entry.get("modules") or not entry.get("test"):
        raise CourseError(f"chapter {chapter}, {title}: name at least one module, and a test")
    return Concept(title, tuple(entry["modules"]), entry["test"], (chapter, *entry.get("again", ())))


def _task(chapter: int, number: int, entry: dict[str, Any]) -> Task:
    where = f"chapter {chapter}, task {number}"
    _only(entry, {"title", "stubs", "tests"}, where)
    if not entry.get("stubs") or not entry.get("tests"):
        raise CourseError(f"{where}: name at least one stub and one test")
    stubs = []
    for name in entry["stubs"]:
        module, colon, function = name.partition(":")
        if not colon:
            raise CourseError(f"{where}: write {name!r} as module:function")
        stubs.append(Stub(module, function))
    return Task(chapter, number, entry["title"], tuple(stubs), tuple(entry["tests"]))


def _only(entry: dict[str, Any], known: set[str], where: str) -> None:
    for name in entry:
        if name not in known:
            raise CourseError(f"{where}: unknown entry {name!r}; known ones are {', '.join(sorted(known))}")
