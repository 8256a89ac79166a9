"""The import contracts in pyproject.toml: they know every module, they do fail, and no two modules need each other."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).parent.parent


def contracts() -> list[dict[str, list[str]]]:
    found: list[dict[str, list[str]]] = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"][
        "importlinter"
    ]["contracts"]
    return found


def all_modules() -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "minisgl").rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def in_one_of(module: str, packages: list[str]) -> bool:
    return any(f"{module}.".startswith(f"{package}.") for package in packages)


def packages_of(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def test_every_module_has_a_layer() -> None:
    layers = re.findall(r"[\w.]+", " ".join(contracts()[0]["layers"]))
    graph = grimp.build_graph("minisgl", cache_dir=None)
    # A package whose modules lie in different layers has none itself, and may import nothing.
    split = {package for layer in layers for package in packages_of(layer)}
    homeless = [module for module in all_modules() if module not in split and not in_one_of(module, layers)]
    assert [name for name in split - {"minisgl"} if graph.find_modules_directly_imported_by(name)] == []
    assert not homeless, f"add them to the layers in pyproject.toml: {homeless}"


def test_every_module_of_the_engine_is_forbidden_to_import_the_book() -> None:
    engine = contracts()[1]["source_modules"]
    others = ["minisgl.__main__", "minisgl.bench", "minisgl.book"]
    homeless = [name for name in all_modules() if name != "minisgl" and not in_one_of(name, [*engine, *others])]
    assert not homeless, f"add them to the second contract in pyproject.toml: {homeless}"


def cycle_in(graph: grimp.ImportGraph) -> list[str]:
    """The first circle of imports that a depth-first walk meets, or nothing."""
    done: set[str] = set()

    def walk(module: str, path: list[str]) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        for imported in sorted(graph.find_modules_directly_imported_by(module)):
            if found := walk(imported, [*path, module]):
                return found
        done.add(module)
        return []

    return next((found for module in sorted(graph.modules) if (found := walk(module, []))), [])


def test_no_modules_import_each_other_in_a_circle() -> None:
    graph = grimp.build_graph("minisgl", cache_dir=None, exclude_type_checking_imports=True)
    assert len(graph.modules) > 100
    assert cycle_in(graph) == []
    graph.add_import(importer="minisgl.errors", imported="minisgl.kvcache.radix")
    assert {"minisgl.errors", "minisgl.kvcache.radix"} <= set(cycle_in(graph))


@pytest.mark.parametrize(
    ("module", "upward", "line"),
    [
        ("errors", "minisgl.batch", "minisgl.errors -> minisgl.batch"),
        ("kvcache/pool", "minisgl.attention.cascade", "minisgl.kvcache.pool -> minisgl.attention.cascade"),
        ("scheduler/loop", "minisgl.engine.engine", "minisgl.scheduler.loop -> minisgl.engine.engine"),
        ("demo", "minisgl.book.svg", "minisgl.demo -> minisgl.book.svg"),
        ("demo", "minisgl.bench.report", "minisgl.demo -> minisgl.bench.report"),
    ],
)
def test_an_upward_import_breaks_a_contract(tmp_path: Path, module: str, upward: str, line: str) -> None:
    shutil.copytree(ROOT / "minisgl", tmp_path / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "minisgl" / f"{module}.py").open("a") as file:
        file.write(f"\nimport {upward}\n")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    result = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert line in result.stdout
