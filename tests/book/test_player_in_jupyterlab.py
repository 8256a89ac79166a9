"""In a real JupyterLab and a real browser: a player steps, also after its notebook was saved and opened again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
import pytest

import minisgl
from tests.browser import Browser, browser

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
    "[...document.querySelectorAll('.minisgl-stepper strong')]"
    ".filter(it => getComputedStyle(it).visibility === 'visible').map(it => it.innerText)"
)
NEXT = ".minisgl-stepper button[aria-label='next picture']"
CLICK_TO_THE_END = (
    "next => { next.focus(); next.click(); next.click();"
    " return next.disabled && document.activeElement.matches('.minisgl-stepper input'); }"
)
STEPPER_HEIGHT = "document.querySelector('.minisgl-stepper').getBoundingClientRect().height"
FOLDED = "[...document.querySelectorAll('.jp-OutputArea details')].map(it => it.innerText.trim())"
DRAWN = "[...document.querySelectorAll('.jp-OutputArea details img')].filter(it => it.naturalWidth).length"
IDLE = "document.querySelector('#jp-main-statusbar')?.innerText.includes('| Idle')"


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


def steps_through(page: Browser) -> None:
    """The first player of the page goes from its first frame to its last and back, and its height stays."""
    page.wait_for(f"{SEEN}.join() === '1 <inserted>'")
    height = page.evaluate(STEPPER_HEIGHT)
    page.click(NEXT)
    page.wait_for(f"{SEEN}.join() === '2 <inserted>'")
    press_until(f"{SEEN}.join() === '3 <inserted>'", page, "ArrowRight", 39)
    assert page.evaluate("document.querySelector('.minisgl-stepper output').innerText") == "3 of 3"
    assert page.evaluate(STEPPER_HEIGHT) == height > 100
    press_until(f"{SEEN}.join() === '1 <inserted>'", page, "Home", 36)
    # A click that reaches the last picture ends its button, and the focus moves on, or the keys were lost.
    assert page.evaluate(f"({CLICK_TO_THE_END})(document.querySelector({json.dumps(NEXT)}))")


def press_until(script: str, page: Browser, key: str, number: int) -> None:
    """Press a key in the player until it has the effect: a cell that JupyterLab shows late takes the focus."""
    end = time.monotonic() + 60
    while True:
        page.evaluate("document.querySelector('.minisgl-stepper input').focus()")
        page.press(key, number)
        try:
            return page.wait_for(script, timeout=2)
        except TimeoutError:
            if time.monotonic() > end:
                raise


@pytest.mark.slow
@pytest.mark.needs("chromium", "jupyterlab", "websocket")
def test_the_player_steps_when_it_was_run_and_when_it_was_saved_and_opened_again(tmp_path: Path) -> None:
    lab = tmp_path / "lab"
    lab.mkdir()
    metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [nbformat.v4.new_code_cell(source) for source in (LISTING, CELL)]
    notebook = nbformat.v4.new_notebook(cells=cells, metadata=metadata)
    nbformat.write(notebook, lab / "x.ipynb")
    with jupyterlab(lab) as url, browser(tmp_path / "chromium") as page:
        page.open(f"{url}lab/tree/x.ipynb")
        page.click(".jp-Cell .cm-content")
        page.wait_for(IDLE)
        page.click("[data-jp-item-name=run] jp-button")
        page.wait_for(f"{KEYWORDS}.length === 1")
        assert (
            page.evaluate("document.querySelector('.jp-RenderedMarkdown code').innerText") == "minisgl/kvcache/radix.py"
        )
        page.click("[data-jp-item-name=run] jp-button")
        steps_through(page)
        page.click("[data-jp-item-name=save] jp-button")
        wait_until(lambda: len(outputs(lab / "x.ipynb")) == 2)
        page.open("about:blank#left")
        page.open(f"{url}lab/tree/x.ipynb")
        steps_through(page)

        # The same notebook from elsewhere: JupyterLab trusts it not, and runs no script of it.
        copy = nbformat.read(lab / "x.ipynb", as_version=4)
        copy.cells[0].source += "\n# from elsewhere"
        nbformat.write(copy, lab / "y.ipynb")
        page.open("about:blank#left")
        page.open(f"{url}lab/tree/y.ipynb")
        page.wait_for(f"{DRAWN} === 3")
        assert page.evaluate(FOLDED) == [f"{number} of 3: {number} <inserted>" for number in (1, 2, 3)]
        assert page.problems == []


def outputs(notebook: Path) -> list[Any]:
    """Of all cells of a file; none while it is being written."""
    try:
        cells = nbformat.read(notebook, as_version=4).cells
    except nbformat.reader.NotJSONError:
        return []
    return [output for cell in cells for output in cell.outputs]


def wait_until(condition: Callable[[], bool], timeout: float = 30.0) -> None:
    end = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
