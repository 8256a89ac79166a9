"""The Makefile's installing and copying, with a Python that only pretends to install."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import LONGEST

ROOT = Path(__file__).parents[2]
PIP = "#!/bin/sh\necho 'Collecting torch'\nexit {status}\n"
PYTHON = """#!/bin/sh
case "$1" in
-c) exit 0;;
-m) mkdir -p .venv/bin
    cp pip .venv/bin/pip
    printf '#!/bin/sh\\necho "$0 $@" >> calls\\n' | tee .venv/bin/python .venv/bin/jupyter > /dev/null
    chmod +x .venv/bin/*;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "notebooks" / "00-a.ipynb").write_text("the book's")
    for name, text in (("python", PYTHON), ("pip", PIP.format(status=0))):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return tmp_path


def make(checkout: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "PYTHON=./python", *arguments]
    return subprocess.run(command, cwd=checkout, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("flags", ["-euo pipefail -c", "-c"], ids=["today", "make 3.81, which ignores them"])
def test_an_installation_that_fails_is_not_taken_for_one(checkout: Path, flags: str) -> None:
    (checkout / "pip").write_text(PIP.format(status=1))
    done = make(checkout, f".SHELLFLAGS={flags}", "demo")
    assert done.returncode != 0
    assert "Collecting torch" in done.stderr, "what pip said"
    assert not (checkout / ".venv" / "ready").exists()
    assert not (checkout / "calls").exists()


def test_the_demo_ends_with_what_comes_next(checkout: Path) -> None:
    done = make(checkout, "demo")
    assert done.returncode == 0, done.stderr
    assert (checkout / "calls").read_text() == ".venv/bin/python -m minisgl demo\n"
    assert "make lab" in done.stdout.splitlines()[-2]
    assert "source .venv/bin/activate" in done.stdout


def test_reading_changes_no_file_of_the_book_and_no_copy_of_the_reader(checkout: Path) -> None:
    assert make(checkout, "lab").returncode == 0
    copy = checkout / "work" / "00-a.ipynb"
    assert copy.read_text() == "the book's"
    copy.write_text("the reader's")
    assert make(checkout, "lab").returncode == 0
    assert copy.read_text() == "the reader's"
    trust, lab = (checkout / "calls").read_text().splitlines()[-2:]
    assert trust == ".venv/bin/jupyter trust work/00-a.ipynb"
    assert ("--allow-root" in lab) == (os.getuid() == 0)
    assert subprocess.run(["git", "check-ignore", "work/x.ipynb"], cwd=ROOT, check=False).returncode == 0


@pytest.mark.parametrize("failing", ["nothing", "lint-imports", "tools.course", "tools.mdbook", "pytest"])
def test_what_fails_beside_something_else_fails_it_all(checkout: Path, failing: str) -> None:
    make(checkout, "pair")  # to install
    for name in ("ruff", "mypy", "lint-imports", "pytest", "python"):
        program = checkout / ".venv" / "bin" / name
        program.write_text(f'#!/bin/sh\necho "$0 $@" >> calls\ncase "$0 $*" in *{failing}*) exit 3;; esac\n')
        program.chmod(0o755)
    done = make(checkout, "test")
    assert (done.returncode == 0) == (failing == "nothing"), done.stderr
    calls = (checkout / "calls").read_text()
    assert "tools.course" in calls
    assert ("--nbmake" in calls) == (failing == "nothing")


def test_files_of_tests_that_come_first_are_there() -> None:
    assert all((ROOT / "tests" / f"{name}.py").is_file() for name in LONGEST)
