"""The first cell of notebooks, which installs the book where a hosted notebook lacks it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

from tools.notebooks import HOSTED, pair

ROOT = Path(__file__).parents[2]
CELL = pair("# A\n", Path("no notebook yet")).cells[1]

# A machine without the package: what the cell asks of IPython is done, but pip only says what it was asked for.
SCRIPT = """
import subprocess, sys
from IPython.core.interactiveshell import InteractiveShell

sys.path[:] = [each for each in sys.path if each != {root!r}]
sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in repr(each)]
shell = InteractiveShell.instance()
run_magic = shell.run_line_magic


def installed(name, line, **options):
    if name != "pip":
        return run_magic(name, line, **options)
    print(name, line)


shell.run_line_magic = installed
done = shell.run_cell({cell!r})
if done.success:
    import minisgl
    print(minisgl.__file__)
else:
    print(repr(done.error_in_exec))
"""


def told(cell: str, folder: Path) -> list[str]:
    """What a notebook's cell and an import of the package say, where the package isn't installed."""
    folder.mkdir(exist_ok=True)
    script = SCRIPT.format(root=str(ROOT), cell=cell)
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, capture_output=True, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines()


@pytest.mark.needs("IPython")
def test_the_book_is_cloned_installed_and_found_without_another_kernel(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    subprocess.run(["git", "init", "--quiet", str(copy)], check=True)
    (copy / "minisgl").mkdir()
    (copy / "minisgl" / "__init__.py").write_text("")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    for command in (["add", "."], [*identity, "commit", "--quiet", "-m", "x"]):
        subprocess.run(["git", "-C", str(copy), *command], check=True)
    folder = tmp_path / "hosted"
    lines = told(CELL.source.replace("https://github.com/YOUR-NAME/minisgl", copy.as_uri()), folder)
    assert lines == [
        'pip install --quiet --editable "./minisgl-book[book]"',
        str(folder / "minisgl-book" / "minisgl" / "__init__.py"),
    ]


@pytest.mark.needs("IPython")
def test_without_an_address_it_asks_for_one(tmp_path: Path) -> None:
    (line,) = [each for each in told(CELL.source, tmp_path / "hosted") if each.startswith("ValueError")]
    assert "put your copy's address into REPOSITORY" in line
    assert not (tmp_path / "hosted" / "minisgl-book").exists()


def test_what_it_installs_is_there() -> None:
    """The extra that it asks for is one of the package's."""
    assert '"./minisgl-book[book]"' in CELL.source
    assert "\nbook = [" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_notebook_begins_with_it() -> None:
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        code = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
        hosted = [HOSTED in cell.metadata.get("tags", []) for cell in code]
        assert hosted == [True] + [False] * (len(code) - 1), path.name
        assert code[0].outputs == []
