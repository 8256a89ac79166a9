"""Kernels that tests start need no TCP port."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

import nbformat
import pytest


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
