"""Starts the ranks of `tests.distributed.peer_ranks` and collects what they have found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

Outcomes = list[Mapping[str, str]]


def run_ranks(size: int, device: str, directory: Path, seconds: float) -> Outcomes:
    """Outcome of every check on every rank. A rank that has not ended after so many seconds is killed, and the checks
    that it did not come to are missing."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    if device == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    module = "tests.distributed.peer_ranks"
    ranks = [
        subprocess.Popen([sys.executable, "-m", module, str(rank), str(size), str(directory), device], env=environment)
        for rank in range(size)
    ]
    end = time.monotonic() + seconds
    try:
        for process in ranks:
            process.wait(max(end - time.monotonic(), 0.1))
    except subprocess.TimeoutExpired:
        pass
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    files = [directory / f"{rank}.json" for rank in range(size)]
    return [json.loads(file.read_text()) if file.exists() else {} for file in files]


def assert_passed(outcomes: Outcomes, check: str) -> None:
    for rank, outcome in enumerate(outcomes):
        assert outcome.get(check, "was not reached") == "passed", f"rank {rank}: {outcome.get(check)}"
