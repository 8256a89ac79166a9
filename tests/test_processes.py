"""Children that work, fail, die, stand still, hang and will not leave; and a parent that stops or dies."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest

from minisgl import processes
from minisgl.child_process import BEAT_INTERVAL, Failed, freeze_heap
from minisgl.errors import ConfigError, EngineDead, Failure, InvalidRequest, MiniSGLError, ModelLoadError, QueueFull
from minisgl.processes import ChildProcess, end_processes, exit_error, wait_until_ready
from tests.children import Behaviour

ERRORS = [QueueFull("full"), EngineDead("dead"), ConfigError("page_size: no"), ModelLoadError("gone")]


@pytest.mark.parametrize("error", [*ERRORS, InvalidRequest("stop", "no such thing")], ids=lambda e: type(e).__name__)
def test_an_error_of_ours_arrives_as_it_left(error: MiniSGLError) -> None:
    frame = msgspec.msgpack.encode(Failure.of(error))
    arrived = msgspec.msgpack.decode(frame, type=Failure).error()
    assert type(arrived) is type(error)
    assert str(arrived) == str(error)
    assert getattr(arrived, "field", None) == getattr(error, "field", None)


def test_any_other_error_keeps_its_name() -> None:
    arrived = Failure.of(ZeroDivisionError("by nothing")).error()
    assert type(arrived) is MiniSGLError
    assert str(arrived) == "ZeroDivisionError: by nothing"


BEHAVIOURS = ["works", "fails", "dies", "hangs", "stubborn", "breaks", "counts"]
LONG = 120.0


def start(behaviour: str, directory: str, sweeps: bool = False, **watched: float) -> ChildProcess:
    options = Behaviour(name=behaviour, directory=directory, behaviour=behaviour, sweeps=sweeps)
    return ChildProcess("tests.children", options, **watched)


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
    error = exit_error("the scheduler process", code, failed)
    assert isinstance(error, EngineDead)
    assert str(error) == says


def test_a_child_reports_that_it_is_ready(children: dict[str, ChildProcess]) -> None:
    assert children["works"].ready.result(LONG).info == {"answer": 42}
    assert not children["works"].exited.done()


def test_a_child_that_cannot_start_says_why(children: dict[str, ChildProcess]) -> None:
    with pytest.raises(ConfigError, match="page_size: must be a power of two"):
        wait_until_ready([children["works"], children["fails"]], LONG)
    assert "the fails process died: page_size" in str(children["fails"].exited.result(LONG))


@pytest.mark.parametrize(("behaviour", "where_from"), [("fails", False), ("breaks", True)])
def test_only_an_unexpected_error_is_told_with_its_traceback(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], behaviour: str, where_from: bool
) -> None:
    """An option or a checkpoint that cannot be used is for the parent to report, in one line."""
    start(behaviour, str(tmp_path)).exited.result(LONG)
    assert ("Traceback" in capfd.readouterr().err) is where_from


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
    assert psutil.Process(children["works"].pid).cmdline()[1:] == ["-m", "tests.children"]


def test_all_are_ended_the_stubborn_by_force(
    children: dict[str, ChildProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    wait_until_ready([children["works"], children["stubborn"]], LONG)
    monkeypatch.setattr(processes, "GRACE", LONG)
    end_processes([children["works"]])
    assert "exit code 0" in str(children["works"].exited.result(LONG))
    monkeypatch.setattr(processes, "GRACE", 2.0)
    end_processes(list(children.values()))
    assert "killed by SIGKILL" in str(children["stubborn"].exited.result(LONG))


def test_a_child_that_is_stopped_is_named_and_killed(tmp_path: Path) -> None:
    child, other = (start("works", str(tmp_path), hang_timeout=4.0, turn_timeout=LONG) for _ in range(2))
    wait_until_ready([child, other], LONG)
    time.sleep(4.5)
    assert not child.exited.done(), "at rest, its heart beats"
    os.kill(child.pid, signal.SIGSTOP)
    begun = time.monotonic()
    error = child.exited.result(LONG)
    assert 3.0 < time.monotonic() - begun < 7.0
    assert str(error) == "the works process has not answered for 4 s; it is stopped or hangs"
    assert child.hung
    assert child.exit_code == -signal.SIGKILL
    assert not other.exited.done()
    end_processes([other])


def test_a_child_that_stops_for_a_moment_lives_on(tmp_path: Path) -> None:
    child = start("works", str(tmp_path), hang_timeout=4.0)
    wait_until_ready([child], LONG)
    for _ in range(2):
        os.kill(child.pid, signal.SIGSTOP)
        while psutil.Process(child.pid).status() != psutil.STATUS_STOPPED:
            time.sleep(0.01)
        assert not child.answers(1.0)
        time.sleep(0.5)
        os.kill(child.pid, signal.SIGCONT)
        assert child.answers(LONG)
    time.sleep(3.0)
    assert not child.exited.done()
    end_processes([child])


def test_a_main_loop_that_hangs_is_noticed_although_a_thread_beside_it_answers(tmp_path: Path) -> None:
    child = start("hangs later", str(tmp_path), hang_timeout=1.0, turn_timeout=2.0)
    wait_until_ready([child], LONG)
    assert child.answers(LONG)
    error = child.exited.result(LONG)
    assert str(error) == "the hangs later process has made no progress for 2 s; its main loop hangs"


def test_a_long_turn_or_start_is_not_taken_for_a_hang(tmp_path: Path) -> None:
    busy = start("computes", str(tmp_path), hang_timeout=1.0, turn_timeout=LONG)
    starting = start("hangs", str(tmp_path), hang_timeout=1.0)
    assert "the computes process died: ArithmeticError: the result is 42" in str(busy.exited.result(LONG))
    assert not starting.exited.done()
    end_processes([starting])


def test_a_parent_that_was_stopped_itself_does_not_blame_its_children(tmp_path: Path) -> None:
    script = STOPPED.format(directory=str(tmp_path))
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    assert parent.stdout.readline() == "ready\n"
    parent.send_signal(signal.SIGSTOP)
    time.sleep(3.0)
    parent.send_signal(signal.SIGCONT)
    assert parent.stdout.read() == "the child lives\n"
    assert parent.wait() == 0
    parent.stdout.close()


STOPPED = """
import time
from minisgl.processes import end_processes, wait_until_ready
from tests.test_processes import start
child = start("works", {directory!r}, hang_timeout=1.0)
wait_until_ready([child], 120)
print("ready", flush=True)
time.sleep(4)
print(child.exited.result(0) if child.exited.done() else "the child lives", flush=True)
end_processes([child])
"""


PARENT = """
import sys, time
from minisgl.processes import wait_until_ready
from tests.test_processes import start
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


def test_a_child_whose_parent_no_longer_listens_still_sweeps_up(tmp_path: Path) -> None:
    """A heartbeat that nobody reads fails before the thread beside it has seen that the parent is dead."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    options = Behaviour(name="works", directory=str(directory), behaviour="works", sweeps=True)
    command = [sys.executable, "-m", "tests.children"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(msgspec.json.encode(options) + b"\n")
        child.stdin.flush()
        assert any(b"42" in line for line in child.stdout), "it is ready"
        child.stdout.close()
        time.sleep(3 * BEAT_INTERVAL)
        assert child.poll() is None
        child.stdin.close()
        assert child.wait(LONG) == 1
    assert not directory.exists()


class Node:
    """Something that keeps itself alive."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def thawed() -> Iterator[None]:
    yield
    gc.unfreeze()


def test_garbage_is_collected_before() -> None:
    gone = weakref.ref(Node())
    freeze_heap()
    assert gone() is None


def test_what_lives_is_not_looked_at_again() -> None:
    living = Node()
    kept, looked_at = weakref.ref(living), len(gc.get_objects())
    freeze_heap()
    assert len(gc.get_objects()) < looked_at / 100
    del living
    gc.collect()
    assert kept() is not None


def test_later_garbage_is_collected() -> None:
    freeze_heap()
    gone = weakref.ref(Node())
    gc.collect()
    assert gone() is None
