"""Headless Chromium for tests, driven through its DevTools protocol."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = "chromium"
_POLL = 0.1
_CHANGED = (
    "Inspected target navigated or closed",
    "Execution context was destroyed.",
    "Cannot find default execution context",
)


class PageHasChanged(Exception):
    """The page has gone to another address while a script ran in it."""


class Browser:
    """One page.

    Args:
        socket: connection to the page, a `websocket.WebSocket`.
    """

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self.problems: list[str] = []
        """Errors on the page's console, exceptions of its scripts, and what it could not load."""
        self.requested: list[str] = []
        """Addresses that the page has asked for."""
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        self.call("Emulation.setFocusEmulationEnabled", enabled=True)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and return its result. Events that come before it are looked at for problems.

        Raises:
            PageHasChanged: in the middle of it.
        """
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if "id" not in message:
                self._note(message)
            elif message["id"] == number:  # others answer `_answer_dialog`, which does not wait
                if message.get("error", {}).get("message") in _CHANGED:
                    raise PageHasChanged
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        if message["method"] == "Page.javascriptDialogOpening":
            self._answer_dialog(params)
        elif message["method"] == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.problems.append(details.get("exception", {}).get("description") or details["text"])
        elif message["method"] == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.problems.append(" ".join(str(arg.get("value", arg.get("description"))) for arg in params["args"]))
        elif message["method"] == "Network.requestWillBeSent":
            self.requested.append(params["request"]["url"])
        elif message["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def _answer_dialog(self, dialog: dict[str, Any]) -> None:
        """A page that asks whether to leave it is left; until somebody answers, `Page.navigate` does not return.

        JupyterLab asks as long as it has not heard that a notebook is saved, which is later than the file is there.
        """
        assert dialog["type"] == "beforeunload", dialog
        message = {"id": next(self._ids), "method": "Page.handleJavaScriptDialog", "params": {"accept": True}}
        self._socket.send(json.dumps(message))

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete' && location.href !== 'about:blank'")

    def evaluate(self, script: str) -> Any:
        """Value of a JavaScript expression; of a promise, what it resolves to."""
        answer = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout: float = 60.0) -> None:
        """Wait until a JavaScript expression is true, or something.

        Raises:
            TimeoutError: it is not within ``timeout`` seconds.
        """
        end = time.monotonic() + timeout
        while not self._is_true(script):
            if time.monotonic() > end:
                raise TimeoutError(f"not true: {script}; problems of the page: {self.problems}")
            time.sleep(_POLL)

    def _is_true(self, script: str) -> bool:
        try:
            return self.evaluate(f"Boolean({script})") is True
        except PageHasChanged:  # it will have to be true of the next page
            return False

    def click(self, selector: str) -> None:
        """Press and release the mouse in the middle of the first element of a CSS selector, once there is one."""
        self.wait_for(f"document.querySelector({json.dumps(selector)})")
        box = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
        x, y = (self.evaluate(f"{box}.{start} + {box}.{size} / 2") for start, size in (("x", "width"), ("y", "height")))
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def press(self, key: str, number: int) -> None:
        """Press and release a key that prints nothing.

        Args:
            key: its name, such as ``ArrowRight``.
            number: its ``keyCode``, such as 39.
        """
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=number)

    def screenshot(self, path: Path) -> None:
        """Write what is seen as PNG."""
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def browser(profile: Path, width: int = 1200, height: int = 1000) -> Iterator[Browser]:
    """Start Chromium with an empty page, and end it after the ``with`` block.

    Args:
        profile: empty directory for it to live in.
        width, height: of the page, in CSS pixels.
    """
    import websocket

    program = shutil.which(PROGRAM)
    assert program is not None
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--remote-debugging-port=0"]
    size = f"--window-size={width},{height}"
    command = [program, *options, size, f"--user-data-dir={profile}", "about:blank"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            page = _first_page(profile / "DevToolsActivePort")
            socket = websocket.create_connection(page, suppress_origin=True, timeout=120)
            yield Browser(socket)
            socket.close()
        finally:
            process.terminate()


def _first_page(port_file: Path, timeout: float = 120.0) -> str:
    """Address of the page's DevTools. Chromium writes its port into a file when it is ready."""
    end = time.monotonic() + timeout
    while not (port_file.exists() and port_file.read_text().count("\n")):
        assert time.monotonic() < end, "Chromium does not start"
        time.sleep(_POLL)
    port = port_file.read_text().split()[0]
    while time.monotonic() < end:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            pages = [target for target in json.load(answer) if target["type"] == "page"]
        if pages:
            return str(pages[0]["webSocketDebuggerUrl"])
        time.sleep(_POLL)
    raise AssertionError("Chromium has no page")
