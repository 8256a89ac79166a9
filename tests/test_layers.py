"""The import contract in pyproject.toml: it knows every module, and it does fail."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPOSED = {"minisgl", "minisgl.engine", "minisgl.kvcache", "minisgl.scheduler"}
"""Packages whose modules belong to several chapters, so that their ``__init__`` stands outside the layers."""


def layered_modules() -> list[str]:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    return re.findall(r"[\w.]+", " ".join(contract["contracts"][0]["layers"]))


def all_modules() -> list[str]:
    paths = (path.relative_to(ROOT).with_suffix("") for path in (ROOT / "minisgl").rglob("*.py"))
    return [".".join(path.parts).removesuffix(".__init__") for path in paths]


def test_every_module_has_a_layer() -> None:
    layers = layered_modules()
    homeless = [
        module
        for module in all_modules()
        if module not in COMPOSED and not any(f"{module}.".startswith(f"{layer}.") for layer in layers)
    ]
    assert not homeless, f"add them to the layers in pyproject.toml: {homeless}"


@pytest.mark.parametrize(
    ("module", "upward"),
    [("errors", "minisgl.core"), ("kvcache/pages", "minisgl.kvcache.radix"), ("scheduler/queue", "minisgl.tokenizer")],
)
def test_an_upward_import_breaks_the_contract(tmp_path: Path, module: str, upward: str) -> None:
    shutil.copytree(ROOT / "minisgl", tmp_path / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    with (tmp_path / "minisgl" / f"{module}.py").open("a") as file:
        file.write(f"\nimport {upward}\n")
    command = "from importlinter.cli import lint_imports_command; lint_imports_command(['--no-cache'])"
    result = subprocess.run([sys.executable, "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert f"minisgl.{module.replace('/', '.')} -> {upward}" in result.stdout
