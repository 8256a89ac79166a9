"""The order of teaching: each public definition of the engine has exactly one chapter, or is reference."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from minisgl.book.course_table import Table, load_table
from minisgl.book.starters import repository

ROOT = repository()
NOT_TAUGHT = ("minisgl.book", "minisgl.bench")
_Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def engine() -> Iterator[tuple[str, str]]:
    """(module, public class or function) of every module of the engine."""
    for path in sorted((ROOT / "minisgl").rglob("*.py")):
        module = path.relative_to(ROOT).with_suffix("").as_posix().replace("/", ".").removesuffix(".__init__")
        if not module.startswith(NOT_TAUGHT):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, _Definition) and not node.name.startswith("_"):
                    yield module, node.name


DEFINITIONS = list(engine())


def homes(table: Table, module: str, definition: str) -> list[int | None]:
    """The chapters that introduce a definition; None stands for the reference.

    An entry for the definition counts more than one for its module. There should be exactly one.
    """
    entries = [(each.number, entry) for each in table.chapters.values() for entry in each.introduces]
    every: list[tuple[int | None, str]] = [*entries, *((None, entry) for entry in table.reference)]
    exact = [number for number, entry in every if entry == f"{module}:{definition}"]
    return exact or [number for number, entry in every if entry == module]


def wrong_homes(table: Table) -> list[str]:
    """Definitions with more or fewer homes than one."""
    found = ((f"{module}:{name}", homes(table, module, name)) for module, name in DEFINITIONS)
    return [f"{definition} has the homes {where}" for definition, where in found if len(where) != 1]


def test_every_public_definition_has_exactly_one_home() -> None:
    assert len(DEFINITIONS) > 300
    assert wrong_homes(load_table()) == [], "enter it in one file of minisgl/book/course/"


def test_every_entry_names_what_exists() -> None:
    table = load_table()
    known = {f"{module}:{name}" for module, name in DEFINITIONS}
    for entry in (*table.reference, *(entry for each in table.chapters.values() for entry in each.introduces)):
        file = ROOT / (entry.partition(":")[0].replace(".", "/") + ".py")
        assert file.is_file() or (file.with_suffix("") / "__init__.py").is_file(), entry
        assert ":" not in entry or entry in known, entry
        assert not entry.startswith(NOT_TAUGHT), entry


def test_every_chapter_of_the_engine_introduces_something() -> None:
    without = [each.number for each in load_table().chapters.values() if not each.introduces]
    assert without == [17]  # it has the benchmarks


def test_the_entry_of_a_definition_counts_more_than_that_of_its_module() -> None:
    table = load_table()
    assert homes(table, "minisgl.scheduler.policy", "LongestPrefixMatch") == [8]
    assert homes(table, "minisgl.scheduler.policy", "Reserve") == [9]


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        (("minisgl.__main__",), "minisgl.demo:main has the homes []"),
        (("minisgl.__main__", "minisgl.demo", "minisgl.errors"), "minisgl.errors:ConfigError has the homes [1, None]"),
    ],
)
def test_a_definition_without_a_home_or_with_two_is_found(reference: tuple[str, ...], problem: str) -> None:
    assert problem in wrong_homes(Table(load_table().chapters, reference))
