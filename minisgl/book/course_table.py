"""The table of the course, one file a chapter in ``course/``: what it introduces and teaches, and what readers write.

``course/06.toml`` holds these entries:

- ``title``: of the chapter, whose number is the file's name.
- ``introduces``: modules (``package.module``) and single definitions (``package.module:Definition``). Of two entries
  that fit a definition, the longer one counts. Each public definition of the engine has one chapter, or is in
  ``course/reference.toml``.
- ``[[concept]]``: a part of a serving engine that the chapter teaches; see `Concept`.
- ``[[task]]``: functions that a reader writes together; see `Task`. Tasks count from 1, in the order of the file, and
  the tests of a task pass as soon as it and the tasks before it are written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.errors import MiniSGLError

TABLE = Path(__file__).with_name("course")
REFERENCE = "reference.toml"


class CourseError(MiniSGLError):
    """A command of the course cannot do what it was asked. The message says what to do instead."""


@dataclass(frozen=True)
class Stub:
    """A function that a reader writes: its module, and its qualified name in it."""

    module: str
    name: str

    @property
    def last_name(self) -> str:
        """The name without that of its class."""
        return self.name.rpartition(".")[2]

    @property
    def path(self) -> str:
        """The module's file, relative to the folder that holds the package."""
        return self.module.replace(".", "/") + ".py"


@dataclass(frozen=True)
class Mutant:
    """A mistake that the tests of a task must notice. In the file: ``["text", "wrong text", "the mistake"]``."""

    text: str  # occurs once in our functions of the task
    wrong: str  # stands in its place
    mistake: str = ""  # in a few words


@dataclass(frozen=True)
class Task:
    """Functions that are written together, and the tests that pass once they are.

    Args:
        tests: ``file``, ``file::test``, or ``file::test[parameter]`` for the cases that have this parameter.
        spec: what the functions must do, in two to six sentences.
        hint: one nudge, without code.
    """

    chapter: int  # the task's place; tasks of a chapter count from 1, in the order of the table
    number: int
    title: str  # what is to be done, in a few words
    stubs: tuple[Stub, ...]
    tests: tuple[str, ...]
    spec: str = ""
    hint: str = ""
    mutants: tuple[Mutant, ...] = ()

    @property
    def id(self) -> str:
        """Chapter and number, such as ``"6.2"``."""
        return f"{self.chapter}.{self.number}"

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

    def task(self, identifier: str) -> Task:
        """The task ``"6.2"``: chapter 6, task 2. Raises `CourseError` if there is none."""
        chapter, dot, number = identifier.partition(".")
        if not (dot and chapter.isdecimal() and number.isdecimal()):
            raise CourseError(f"{identifier!r} names no task; write chapter and number, such as 6.2")
        tasks = self.chapter_with_tasks(int(chapter)).tasks
        if not 1 <= int(number) <= len(tasks):
            raise CourseError(f"chapter {chapter} has the tasks {tasks[0].id} to {tasks[-1].id}, and no {identifier}")
        return tasks[int(number) - 1]

    def homes(self, module: str, definition: str) -> list[int | None]:
        """The chapters that introduce a definition; None stands for the reference.

        An entry for the definition counts more than one for its module. There should be exactly one.
        """
        entries = [(each.number, entry) for each in self.chapters.values() for entry in each.introduces]
        every: list[tuple[int | None, str]] = [*entries, *((None, entry) for entry in self.reference)]
        exact = [number for number, entry in every if entry == f"{module}:{definition}"]
        return exact or [number for number, entry in every if entry == module]


def load_table(folder: Path = TABLE) -> Table:
    """Read the table. Raises `CourseError` if it is not well formed; the message names the entry."""
    chapters = {}
    for path in sorted(folder.glob("*.toml")):
        if path.name != REFERENCE:
            if not path.stem.isdecimal():
                raise CourseError(f"{path}: name the file after its chapter's number, such as 06.toml")
            chapters[int(path.stem)] = _chapter(int(path.stem), _read(path))
    reference = _read(folder / REFERENCE)
    _only(reference, {"reference"}, REFERENCE)
    return Table(dict(sorted(chapters.items())), tuple(reference["reference"]))


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{path}: {error}") from error


def _chapter(number: int, entry: dict[str, Any]) -> Chapter:
    _only(entry, {"title", "introduces", "concept", "task"}, f"chapter {number}")
    concepts = tuple(_concept(number, concept) for concept in entry.get("concept", []))
    tasks = tuple(_task(number, place, task) for place, task in enumerate(entry.get("task", []), start=1))
    return Chapter(number, entry["title"], tuple(entry.get("introduces", ())), concepts, tasks)


def _concept(chapter: int, entry: dict[str, Any]) -> Concept:
    title = entry["title"]
    _only(entry, {"title", "modules", "test", "again"}, f"chapter {chapter}, {title}")
    if not entry.get("modules") or not entry.get("test"):
        raise CourseError(f"chapter {chapter}, {title}: name at least one module, and a test")
    return Concept(title, tuple(entry["modules"]), entry["test"], (chapter, *entry.get("again", ())))


def _task(chapter: int, number: int, entry: dict[str, Any]) -> Task:
    where = f"chapter {chapter}, task {number}"
    _only(entry, {"title", "stubs", "tests", "spec", "hint", "mutants"}, where)
    if not entry.get("stubs") or not entry.get("tests"):
        raise CourseError(f"{where}: name at least one stub and one test")
    stubs = []
    for name in entry["stubs"]:
        module, colon, function = name.partition(":")
        if not colon:
            raise CourseError(f"{where}: write {name!r} as module:function")
        stubs.append(Stub(module, function))
    mutants = entry.get("mutants", [])
    if any(len(mutant) not in (2, 3) for mutant in mutants):
        raise CourseError(f"{where}: write a mutant as [text, wrong text] or [text, wrong text, mistake]")
    return Task(
        chapter,
        number,
        entry["title"],
        tuple(stubs),
        tuple(entry["tests"]),
        spec=entry.get("spec", "").strip(),
        hint=entry.get("hint", "").strip(),
        mutants=tuple(Mutant(*mutant) for mutant in mutants),
    )


def _only(entry: dict[str, Any], known: set[str], where: str) -> None:
    for name in entry:
        if name not in known:
            raise CourseError(f"{where}: unknown entry {name!r}; known ones are {', '.join(sorted(known))}")
