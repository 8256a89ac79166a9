"""What `pip install` brings: every file of the package, and not its modules alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('wheel')"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, since setuptools leaves folders behind."""
    copy = tmp_path_factory.mktemp("copy")
    shutil.copytree(ROOT / "minisgl", copy / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    (copy / "wheel").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=copy, check=True, capture_output=True, timeout=120)
    (built,) = (copy / "wheel").iterdir()
    return built


def test_the_wheel_has_every_file_of_the_package(wheel: Path) -> None:
    package = wheel.parents[1] / "minisgl"
    there = {path.relative_to(package.parent).as_posix() for path in package.rglob("*") if path.is_file()}
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if name.startswith("minisgl/")}
    assert {path.rpartition(".")[2] for path in there} >= {"py", "toml", "html", "css", "js"}
    assert packed == there


@pytest.mark.slow
@pytest.mark.needs("nbclient", "ipykernel")
@pytest.mark.parametrize("chapter", range(7))
def test_the_first_notebooks_need_no_more_than_the_wheel(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chapter: int
) -> None:
    """In an empty folder, as in a hosted notebook."""
    from nbclient import NotebookClient

    site, folder = tmp_path / "site", tmp_path / "empty"
    folder.mkdir()
    with zipfile.ZipFile(wheel) as opened:
        opened.extractall(site)
    monkeypatch.setenv("PYTHONPATH", str(site))  # before the checkout, which is installed as well
    (path,) = (ROOT / "notebooks").glob(f"{chapter:02d}-*.ipynb")
    notebook = nbformat.read(path, as_version=4)
    notebook.cells.append(nbformat.v4.new_code_cell("import minisgl; minisgl.__file__"))
    NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    assert notebook.cells[-1].outputs[0].data["text/plain"] == repr(str(site / "minisgl" / "__init__.py"))
