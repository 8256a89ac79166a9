"""An assignment as its folder describes it: what is graded, for how many points, and by which tests."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minisgl.course.errors import CourseError

ROOT = Path(__file__).resolve().parents[2]
"""The checkout: suites and assignments lie beside the package, and are not installed with it."""

FOLDER = ROOT / "assignments"


@dataclass(frozen=True)
class Item:
    """A line of the rubric. Its points are given if every one of its tests passes.

    Args:
        name: what is asked for.
        points: that it is worth.
        tests: ``file``, ``file::test`` or ``file::Class``; the file is looked for beside ``assignment.toml``, then in
            the checkout.
        performance: the tests count operations, so that a submission that fails no others is slow, and not wrong.
    """

    name: str
    points: int
    tests: tuple[str, ...]
    performance: bool = False


@dataclass(frozen=True)
class Assignment:
    """What ``assignment.toml`` says.

    Args:
        name: of the folder.
        folder: where handout, starter and tests are.
        title: in a few words.
        starter_fails: what the first failure of the starter says.
        solution: ``module:Class`` that earns all points.
        time_limit: seconds that a submission is given, unless the command says otherwise.
        items: the rubric.
    """

    name: str
    folder: Path
    title: str
    starter_fails: str
    solution: str
    time_limit: float
    items: tuple[Item, ...]

    @property
    def points(self) -> int:
        """All that can be earned."""
        return sum(item.points for item in self.items)

    def tests(self, item: Item) -> list[str]:
        """The tests of an item, with absolute paths.

        Raises:
            CourseError: a file is not there.
        """
        return [self._absolute(test) for test in item.tests]

    def _absolute(self, test: str) -> str:
        file, separator, name = test.partition("::")
        for base in (self.folder, ROOT):
            if (base / file).is_file():
                return f"{base / file}{separator}{name}"
        raise CourseError(f"{self.name}: {file} is neither in {self.folder} nor in {ROOT}")


def names() -> list[str]:
    """The assignments of this checkout."""
    return sorted(path.parent.name for path in FOLDER.glob("*/assignment.toml"))


def load(name: str) -> Assignment:
    """The assignment called ``name``, or the one in the folder ``name``: a teacher's own copy.

    Raises:
        CourseError: there is none, or its table is not valid.
    """
    folder = FOLDER / name if name in names() else Path(name).resolve()
    file = folder / "assignment.toml"
    if not file.is_file():
        known = ", ".join(names()) or "none, since they are in the repository, and not in an installed package"
        raise CourseError(f"no assignment {name!r}; choose from {known}; or give a folder that has one")
    try:
        table: dict[str, Any] = tomllib.loads(file.read_text(encoding="utf-8"))
        items = tuple(Item(**{**entry, "tests": tuple(entry["tests"])}) for entry in table.pop("items"))
        return Assignment(name=folder.name, folder=folder, items=items, **table)
    except (KeyError, TypeError, tomllib.TOMLDecodeError) as error:
        raise CourseError(f"{file}: {error}") from error
