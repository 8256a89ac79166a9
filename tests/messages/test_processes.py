"""Children that work, fail, die, hang and will not leave; and a parent that dies."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from minisgl.errors import ConfigError, EngineDead
from minisgl.messages import Failure, processes
from minisgl.messages.child import Failed
from minisgl.messages.processes import ChildProcess, end, explain, wait_until_ready
from tests.messages.children import Behaviour

BEHAVIOURS = ["works", "fails", "dies", "hangs", "stubborn", "breaks", "counts"]
LONG = 120.0


def start(behaviour: str, directory: str, sweeps: bool = False) -> ChildProcess:
    options = Behaviour(name=behaviour, directory=directory, behaviour=behaviour, sweeps=sweeps)
    return ChildProcess("tests.messages.children", options)


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ChildProcess]]:
    """One of each kind. They start at the same time, since starting is slow."""
    directory = str(tmp_path_factory.mktemp("children"))
    started = {kind: start(kind, directory) for kind in BEHAVIOURS}
    yield started
    for child in started.values():
        child.kill()
        child.exited.result(LONG)


def test_of_a_child_that_has_ended_no_file_stays_open(tmp_path: Path) -> None:  # before the others open theirs
    gc.collect()  # else this may close files of other tests meanwhile
    before = psutil.Process().num_fds()
    child = start("fails", str(tmp_path))
    assert psutil.Process().num_fds() > before
    child.exited.result(LONG)
    assert psutil.Process().num_fds() <= before


@pytest.mark.parametrize(
    ("code", "failed", "says"),
    [
        (-signal.SIGKILL, None, "the scheduler process was killed by SIGKILL"),
        (0, None, "the scheduler process ended with exit code 0"),
        (137, None, "the scheduler process ended with exit code 137"),
        (1, Failed(Failure("ConfigError", "page_size: no")), "the scheduler process died: page_size: no"),
        (-signal.SIGTERM, Failed(Failure("QueueFull", "full")), "the scheduler process died: full"),
    ],
)
def test_how_a_child_has_ended(code: int, failed: Failed | None, says: str) -> None:
    error = explain("scheduler", code, failed)
    assert isinstance(error, EngineDead)
    assert str(error) == says


def test_a_child_reports_that_it_is_ready(children: dict[str, ChildProcess]) -> None:
    assert children["works"].ready.result(LONG).info == {"answer": 42}
    assert not children["works"].exited.done()


def test_a_child_that_cannot_start_says_why(children: dict[str, ChildProcess]) -> None:
    with pytest.raises(ConfigError, match="page_size: must be a power of two"):
        wait_until_ready([children["works"], children["fails"]], LONG)
    assert "the fails process died: page_size" in str(children["fails"].exited.result(LONG))


def test_a_child_that_is_killed_is_named_with_its_signal(children: dict[str, ChildProcess]) -> None:
    with pytest.raises(EngineDead, match="the dies process was killed by SIGKILL"):
        wait_until_ready([children["hangs"], children["dies"]], LONG)


def test_a_child_that_breaks_later_has_last_words(children: dict[str, ChildProcess]) -> None:
    assert children["breaks"].ready.result(LONG)
    assert "the breaks process died: ZeroDivisionError: by nothing" in str(children["breaks"].exited.result(LONG))


def test_a_child_that_is_ready_has_a_frozen_heap(children: dict[str, ChildProcess]) -> None:
    assert re.search(r"\d{4,} objects are frozen", str(children["counts"].exited.result(LONG)))


def test_a_child_that_hangs_at_its_start_is_an_error(children: dict[str, ChildProcess]) -> None:
    with pytest.raises(EngineDead, match=r"not ready within 0\.01 s: hangs; .* start_timeout"):
        wait_until_ready([children["hangs"]], 0.01)


def test_ctrl_c_does_not_reach_children(children: dict[str, ChildProcess]) -> None:
    assert os.getpgid(children["works"].pid) != os.getpgid(0)


def test_options_are_not_on_the_command_line(children: dict[str, ChildProcess]) -> None:
    assert children["works"].ready.result(LONG)
    assert psutil.Process(children["works"].pid).cmdline()[1:] == ["-m", "tests.messages.children"]


def test_all_are_ended_the_stubborn_by_force(
    children: dict[str, ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_ready([children["works"], children["stubborn"]], LONG)
    monkeypatch.setattr(processes, "GRACE", LONG)
    end([children["works"]])
    assert "exit code 0" in str(children["works"].exited.result(LONG))
    monkeypatch.setattr(processes, "GRACE", 2.0)
    end(list(children.values()))
    assert "killed by SIGKILL" in str(children["stubborn"].exited.result(LONG))


PARENT = """
import sys, time
from minisgl.messages.processes import wait_until_ready
from tests.messages.test_processes import start
children = [start("works", sys.argv[1]), start("stubborn", sys.argv[1], sweeps=True)]
wait_until_ready(children, 120)
print(*(child.pid for child in children), flush=True)
time.sleep(3600)
"""


def test_children_die_with_their_parent_and_sweep_up(tmp_path: Path) -> None:
    directory = tmp_path / "sockets"
    directory.mkdir()
    (directory / "a socket").touch()
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(directory)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    children = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(children) == 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    _, alive = psutil.wait_procs(children, timeout=30)
    assert not alive
    assert not directory.exists()
