"""What becomes of ranks that end, with programs in their place that start at once."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from minisgl.core.config import EngineConfig
from minisgl.distributed.messages import Endpoint, RankOptions
from minisgl.distributed.rank_group import RankGroup
from tests.distributed.generating import wait_for

Start = Callable[..., RankGroup]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts so many ranks, each of which runs a shell script."""
    groups: list[RankGroup] = []

    def start_ranks(script: str, size: int = 1) -> RankGroup:
        program = tmp_path / "rank"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        group = RankGroup()
        groups.append(group)
        with open(os.devnull, "wb") as reports:
            told = {"path": "", "store_port": 0, "reports": reports.fileno(), "threads": 1}
            told |= {"config": EngineConfig(), "endpoint": Endpoint("nowhere")}
            group.start([RankOptions(name=f"rank-{rank}", rank=rank, **told) for rank in range(size)], None)
        return group

    yield start_ranks
    for group in groups:
        group.close()


class EndsBeforeItReads(subprocess.Popen[bytes]):
    """A process whose parent is slow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wait()


def test_a_rank_that_ends_before_it_has_read_its_setup_is_noticed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", EndsBeforeItReads)
    group = start("exit 3")
    assert wait_for(lambda: group.end is not None, 10.0)
    assert group.end == "rank 0 ended with exit code 3"


PARENT = """
trap 'exit 3' TERM
'{python}' -c "import os, subprocess; os.mkdir(str(subprocess.Popen(['sleep', '600'], start_new_session={apart}).pid))"
read setup
read nothing
"""


@pytest.mark.parametrize(
    ("apart", "number", "verdict"),
    [
        (False, signal.SIGKILL, "was killed by SIGKILL"),
        (True, signal.SIGTERM, "ended with exit code 3"),
    ],
)
def test_outputs_that_others_hold_open_are_not_waited_for(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool, number: signal.Signals, verdict: str
) -> None:
    """Each rank has a child, which inherits its output, and ends with it unless it has a session of its own. One rank
    ends, and the other because of it."""
    children = tmp_path / "children"
    children.mkdir()
    monkeypatch.chdir(children)
    group = start(PARENT.format(python=sys.executable, apart=apart), size=2)
    assert wait_for(lambda: len(list(children.iterdir())) == 2, 20.0)
    processes = [psutil.Process(int(child.name)) for child in children.iterdir()]
    try:
        os.kill(group.children[1].pid, number)
        assert wait_for(lambda: group.end is not None, 10.0)
        assert group.end == f"rank 1 {verdict}"
        begun = time.monotonic()
        group.close()
        assert time.monotonic() - begun < 15.0
        assert len(psutil.wait_procs(processes, timeout=0.0 if apart else 10.0)[1]) == (2 if apart else 0)
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


class Terminal(io.StringIO):
    """Shows nothing before it may."""

    def __init__(self) -> None:
        super().__init__()
        self.may_show = threading.Event()

    def write(self, text: str) -> int:
        self.may_show.wait(10.0)
        return super().write(text)


def test_the_last_words_of_a_rank_are_heard(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if what it had said before is still being passed on a while after it has ended."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    group = start("read setup; echo calculating; echo the abacus is broken; exit 3")
    assert wait_for(lambda: group.children[0].exit_code is not None, 10.0)
    time.sleep(0.3)
    terminal.may_show.set()
    assert wait_for(lambda: group.end is not None, 10.0)
    assert group.end == "rank 0 ended with exit code 3: the abacus is broken"
