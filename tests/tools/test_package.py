"""What `pip install` brings: every file of the package, and not its modules alone."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
BUILD = "from setuptools.build_meta import build_wheel; build_wheel('wheel')"


def test_the_wheel_has_every_file_of_the_package(tmp_path: Path) -> None:
    shutil.copytree(ROOT / "minisgl", tmp_path / "minisgl", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    there = {path.relative_to(tmp_path).as_posix() for path in (tmp_path / "minisgl").rglob("*") if path.is_file()}
    (tmp_path / "wheel").mkdir()
    subprocess.run([sys.executable, "-c", BUILD], cwd=tmp_path, check=True, capture_output=True, timeout=120)
    (wheel,) = (tmp_path / "wheel").iterdir()
    with zipfile.ZipFile(wheel) as opened:
        packed = {name for name in opened.namelist() if name.startswith("minisgl/")}
    assert {path.rpartition(".")[2] for path in there} >= {"py", "toml", "html", "css", "js"}
    assert packed == there
