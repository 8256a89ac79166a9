"""The table of the course, one file a chapter in ``course/``: what it introduces and teaches, and what readers write.

``course/06.toml`` is a `Chapter` whose number is the file's name, with a ``[[concept]]`` for each `Concept` and a
``[[task]]`` for each `Task`. The tests of a task pass as soon as it and the tasks before it are written.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar, cast

from minisgl.errors import MiniSGLError

TABLE = Path(__file__).with_name("course")
REFERENCE = "reference.toml"
Entry = TypeVar("Entry")


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
        return f"{self.chapter}.{self.number}"

    def message(self, stub: Stub) -> str:
        """What its stub says when it is called."""
        return f"Chapter {self.chapter}, task {self.number}: {stub.name}"

    @property
    def messages(self) -> list[str]:
        return [self.message(stub) for stub in self.stubs]


@dataclass(frozen=True)
class Concept:
    """A part of a serving engine that a chapter teaches."""

    chapter: int  # that introduces it
    title: str  # its name in the field
    modules: tuple[str, ...]  # that hold it
    test: str  # ``file`` or ``file::test`` that fails without it
    again: tuple[int, ...] = ()  # later chapters that take it up again

    @property
    def chapters(self) -> tuple[int, ...]:
        return (self.chapter, *self.again)


@dataclass(frozen=True)
class Chapter:
    """One chapter."""

    number: int
    title: str
    # Modules, ``package.module``, and definitions, ``package.module:Definition``, which count more. Each public
    # definition of the engine has one chapter, or is in ``course/reference.toml``.
    introduces: tuple[str, ...] = ()
    concepts: tuple[Concept, ...] = ()  # what it teaches first
    tasks: tuple[Task, ...] = ()  # what its reader writes


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


def load_table(folder: Path = TABLE) -> Table:
    """Read the table. Raises `CourseError` if it is not well formed; the message names the entry."""
    chapters = {}
    for path in sorted(folder.glob("*.toml")):
        if path.name != REFERENCE:
            if not path.stem.isdecimal():
                raise CourseError(f"{path}: name the file after its chapter's number, such as 06.toml")
            chapters[int(path.stem)] = _chapter(int(path.stem), read_toml(path))
    return Table(dict(sorted(chapters.items())), tuple(read_toml(folder / REFERENCE)["reference"]))


def _chapter(number: int, entry: dict[str, Any]) -> Chapter:
    where = f"chapter {number}"
    concepts = tuple(
        parsed(Concept, each, f"{where}, {each.get('title')}", chapter=number) for each in entry.pop("concept", [])
    )
    tasks = tuple(_task(number, place, each) for place, each in enumerate(entry.pop("task", []), start=1))
    return parsed(Chapter, entry, where, number=number, concepts=concepts, tasks=tasks)


def _task(chapter: int, number: int, entry: dict[str, Any]) -> Task:
    where = f"chapter {chapter}, task {number}"
    for name in entry.get("stubs", []):
        if ":" not in name:
            raise CourseError(f"{where}: write {name!r} as module:function")
    for mutant in entry.get("mutants", []):
        if len(mutant) not in (2, 3):
            raise CourseError(f"{where}: write a mutant as [text, wrong text] or [text, wrong text, mistake]")
    texts = {name: entry[name].strip() for name in ("spec", "hint") if name in entry}
    stubs = [Stub(*name.split(":")) for name in entry.get("stubs", [])]
    mutants = [Mutant(*mutant) for mutant in entry.get("mutants", [])]
    return parsed(Task, entry | texts | {"stubs": stubs, "mutants": mutants}, where, chapter=chapter, number=number)


def read_toml(path: Path) -> dict[str, Any]:
    """What a file says. Raises `CourseError` if it is no TOML."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CourseError(f"{path}: {error}") from error


def parsed(kind: type[Entry], entry: Mapping[str, Any], where: str, **others: Any) -> Entry:
    """An entry of a file as a dataclass; lists become tuples, and ``others`` are fields that the file does not have.

    Raises `CourseError` for entries that are unknown, missing or empty lists.
    """
    every = {field.name: field for field in fields(cast(Any, kind)) if field.name not in others}
    if unknown := [name for name in entry if name not in every]:
        known = ", ".join(sorted(every))
        raise CourseError(f"{where}: unknown entry {unknown[0]!r}; known ones are {known}")
    needed = [name for name, field in every.items() if field.default is MISSING and entry.get(name, []) == []]
    if needed:
        raise CourseError(f"{where}: name its {', '.join(needed)}")
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    return kind(**values, **others)
