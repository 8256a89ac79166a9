"""Kernels that tests start need no TCP port."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.needs("nbclient", "ipykernel")
def test_a_kernel_is_reached_over_files_that_go_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from nbclient import NotebookClient

    code = "from ipykernel.kernelapp import IPKernelApp; print(IPKernelApp.instance().transport)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    with TemporaryDirectory() as directory:
        monkeypatch.setattr("tempfile.tempdir", directory)
        NotebookClient(notebook, kernel_name="python3").execute()
        assert not list(Path(directory).iterdir())
    assert notebook.cells[0].outputs[0].text == "ipc\n"


@pytest.mark.needs("nbmake", "ipykernel")
@pytest.mark.parametrize(("options", "seconds"), [((), "900"), (("--timeout=7", "--nbmake-timeout=5"), "7")])
def test_notebooks_get_more_time_than_tests(tmp_path: Path, options: tuple[str, ...], seconds: str) -> None:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")]), tmp_path / "one.ipynb")
    (tmp_path / "test_one.py").write_text("def test_one(): pass\n")
    (tmp_path / "conftest.py").write_text(
        "import pytest\n"
        "pytest_plugins = ['tests.notebook_kernels']\n"
        "def pytest_report_header(config):\n"
        "    return f'a cell: {config.option.nbmake_timeout}'\n"
        "@pytest.hookimpl(trylast=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    for item in items:\n"
        "        mark = item.get_closest_marker('timeout')\n"
        "        print(item.name, mark.args[0] if mark else 'as the others')\n"
    )
    command = [sys.executable, "-m", "pytest", "-s", "--nbmake", "--collect-only", f"--rootdir={tmp_path}", *options]
    told = subprocess.run(
        [*command, str(tmp_path)], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}
    ).stdout
    cell = "5" if options else seconds
    assert f"a cell: {cell}" in told
    assert "test_one as the others" in told
    assert f"one.ipynb {'as the others' if options else seconds}" in told
