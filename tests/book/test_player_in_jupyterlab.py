"""In a real JupyterLab and a real browser: a listing is highlighted, the player appears, steps and plays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nbformat
import pytest

import minisgl
from tests.browser import browser

CELL = """
import numpy as np
from minisgl.kvcache.radix import RadixCache
from minisgl.book import player, radix_tree

cache, frames, captions = RadixCache(1), [], []
for length in (1, 2, 3):
    cache.insert(np.arange(length, dtype=np.int32), np.arange(length, dtype=np.int32))
    frames.append(radix_tree(cache))
    captions.append(f"{length} <inserted>")
player(frames, captions)
"""
LISTING = """
from minisgl.kvcache.radix import RadixCache
from minisgl.book import show

show(RadixCache.match)
"""
KEYWORDS = "[...document.querySelectorAll('.jp-RenderedMarkdown pre span')].filter(it => it.innerText === 'def')"
# The caption of the frame that is seen: the others are in the page and hidden.
SEEN = (
    "[...document.querySelectorAll('.jp-OutputArea strong')].filter(it => it.offsetParent).map(it => it.innerText)[0]"
)


@contextmanager
def jupyterlab(root: Path) -> Iterator[str]:
    """A server of its own, with no settings but its own; yields its address."""
    directories = {f"JUPYTER_{name}_DIR": str(root / name.lower()) for name in ("CONFIG", "DATA", "RUNTIME")}
    package = {"PYTHONPATH": str(Path(minisgl.__file__).parents[1])}
    environment = {**os.environ, **directories, **package, "IPYTHONDIR": str(root / "ipython")}
    options = ["--no-browser", "--allow-root", "--IdentityProvider.token=", "--ServerApp.port=0"]
    command = [sys.executable, "-m", "jupyterlab", *options, f"--ServerApp.root_dir={root}"]
    log = (root / "lab.log").open("w")
    with log, subprocess.Popen(command, cwd=root, env=environment, stdout=log, stderr=log) as process:
        try:
            yield _address(root / "runtime", process)
        finally:
            process.terminate()


def _address(runtime: Path, process: subprocess.Popen[bytes], timeout: float = 60.0) -> str:
    end = time.monotonic() + timeout
    while time.monotonic() < end and process.poll() is None:
        for file in runtime.glob("jpserver-*.json"):
            try:
                url = json.loads(file.read_text())["url"]
                urllib.request.urlopen(f"{url}api").close()
            except (OSError, ValueError):  # does not answer yet, or its file is half written
                break
            return str(url)
        time.sleep(0.1)
    raise AssertionError("JupyterLab does not start")


@pytest.mark.slow
@pytest.mark.needs("chromium", "jupyterlab", "ipywidgets", "websocket")
def test_a_listing_is_highlighted_and_the_player_steps_and_plays(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in (LISTING, CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, lab / "x.ipynb")
    with jupyterlab(lab) as url, browser(tmp_path / "chromium") as page:
        page.open(f"{url}lab/tree/x.ipynb")
        page.click(".jp-Cell .cm-content")
        page.wait_for("document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')")
        page.click("[data-jp-item-name=run] jp-button")
        page.wait_for(f"{KEYWORDS}.length === 1")
        assert (
            page.evaluate("document.querySelector('.jp-RenderedMarkdown code').innerText") == "minisgl/kvcache/radix.py"
        )
        page.click("[data-jp-item-name=run] jp-button")
        page.wait_for(f"{SEEN} === '1 of 3: 1 <inserted>'")
        page.click(".jp-OutputArea .noUi-handle")
        page.press("ArrowRight", 39)
        page.wait_for(f"{SEEN} === '2 of 3: 2 <inserted>'", timeout=10)
        page.click(".jp-OutputArea .widget-play button")
        page.wait_for(f"{SEEN} === '3 of 3: 3 <inserted>'", timeout=10)
        assert page.problems == []
