"""Runs scripts in copies of a process that has imported what all tests import: a small run takes half the time so.

As a script it is that process. It knows nothing of minisgl, so that each copy imports the package it is told of.
"""

from __future__ import annotations

import gc
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Self

IMPORTED = (
    "torch",
    "torch._dynamo",
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.llama.modeling_llama",
    "pytest",
    "pytest_timeout",
    "hypothesis",
    "fastapi",
    "uvicorn",
    "httpx",
    "openai",
    "jsonschema",
    "llguidance",
    "prometheus_client",
    "psutil",
    "zmq",
)


class PytestCopies:
    """A process to copy; it ends with the ``with`` block. One thread may use it at a time."""

    def __enter__(self) -> Self:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        # PyTorch's compiler imports Triton, which decides then; the tests of the course run on CPUs.
        environment |= {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "1"}
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            cwd="/",
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self._process.communicate()

    def run(self, script: Sequence[str], workplace: Path, environment: Mapping[str, str], seconds: float) -> str:
        """Run a script with arguments in a folder, and return what it wrote.

        Raises:
            TimeoutError: it took longer than ``seconds``, and was killed.
            BrokenPipeError: the process that is copied has ended.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as output:
            job = [list(script), str(workplace), dict(environment), seconds, output.name]
            self._process.stdin.write(json.dumps(job) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
            if not answer:
                raise BrokenPipeError(f"no copy can be made: {sys.executable} {__file__} has ended")
            if not json.loads(answer):
                raise TimeoutError
            return output.read()


def _serve() -> None:
    """Make a copy for each line of the input, and answer whether it has ended in time."""
    sys.path.pop(0)  # this folder
    for name in IMPORTED:
        import_module(name)
    gc.collect()
    gc.freeze()  # a copy that collects garbage looks at what is its own, and leaves the rest to be shared
    for line in sys.stdin:
        script, workplace, environment, seconds, output = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _become(workplace, environment, output)
            _run(script)
            os._exit(0)
        print(json.dumps(_ends(pid, seconds)), flush=True)


def _become(workplace: str, environment: Mapping[str, str], output: str) -> None:
    """Make of this process what a new one would be in that folder, with that environment."""
    os.setsid()
    os.chdir(workplace)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = [workplace, *environment.get("PYTHONPATH", "").split(os.pathsep)]
    sys.dont_write_bytecode = bool(environment.get("PYTHONDONTWRITEBYTECODE"))
    for name, mode, descriptors in ((os.devnull, os.O_RDONLY, (0,)), (output, os.O_WRONLY | os.O_APPEND, (1, 2))):
        file = os.open(name, mode)
        for descriptor in descriptors:
            os.dup2(file, descriptor)
        os.close(file)


def _run(script: Sequence[str]) -> None:
    sys.argv = list(script)
    try:
        runpy.run_path(script[0], run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _ends(pid: int, seconds: float) -> bool:
    """Wait for a copy, and kill what it has left behind. If time is over it is killed too; False then."""
    deadline = time.monotonic() + seconds
    while in_time := time.monotonic() < deadline:
        if os.waitpid(pid, os.WNOHANG) != (0, 0):
            break
        time.sleep(0.01)
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
    if not in_time:
        os.waitpid(pid, 0)
    return in_time


if __name__ == "__main__":
    _serve()
