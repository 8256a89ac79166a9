"""A rank dies, hangs or errs, at any time: callers get an error that names it, soon, and nothing is left."""

from __future__ import annotations

import errno
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import zmq

from minisgl.distributed import remote_executor
from minisgl.distributed.rank_process import open_store
from minisgl.distributed.remote_executor import RemoteExecutor
from minisgl.errors import EngineDead, ModelLoadError
from minisgl.llm import LLM, Generation
from tests.distributed import broken
from tests.distributed.generating import GREEDY, OPTIONS, PROMPTS, ranks_of, step_for_ever, tokens, wait_for
from tests.model_zoo import tiny_checkpoint

LIMIT = 10.0
"""Seconds in which everybody must have heard, and everything must be gone."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")[0]


@pytest.fixture(autouse=True)
def nothing_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """After each test: no rank, no file or directory, no shared memory, no pipe, socket or other open file in the
    driver."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    shared = set(os.listdir("/dev/shm")) if sys.platform == "linux" else set()
    open_store()  # what PyTorch opens once and for all with the first one is open now
    files = open_files()
    yield
    assert wait_for(lambda: not ranks_of(psutil.Process()), LIMIT)
    assert [name for name in os.listdir(tmp_path) if "minisgl" in name] == []
    if sys.platform == "linux":
        assert {name for name in set(os.listdir("/dev/shm")) - shared if "minisgl" in name or "psm" in name} == set()
    assert open_files() <= files


def open_files() -> int:
    """How many the driver has, without those that garbage still holds."""
    gc.collect()
    return psutil.Process().num_fds()


def start(path: Path, **options: Any) -> LLM:
    return LLM(path, **{**OPTIONS, "num_pages": 64, "tensor_parallel_size": 2, **options})


def begin(llm: LLM, steps: int) -> list[Generation]:
    """Submit all prompts and run some steps."""
    generations = [generation for prompt in PROMPTS for generation in llm.prepare(prompt, GREEDY)]
    for generation in generations:
        llm.submit(generation)
    for _ in range(steps):
        llm.step()
    return generations


def kill(llm: LLM, rank: int, number: signal.Signals = signal.SIGKILL) -> None:
    assert isinstance(llm.executor, RemoteExecutor)
    os.kill(llm.executor.processes.children[rank].pid, number)


def assert_all_end(llm: LLM, generations: list[Generation], reason: str) -> None:
    begun = time.monotonic()
    with pytest.raises(EngineDead, match=reason):
        step_for_ever(llm)
    assert time.monotonic() - begun < LIMIT
    assert all(generation.completion().finish_reason == "error" for generation in generations)
    assert all(reason in str(generation.request.error) for generation in generations)
    assert not llm.scheduler.has_work
    with pytest.raises(EngineDead, match=reason):
        llm.generate([1], GREEDY)


@pytest.mark.parametrize(
    ("rank", "steps", "options"),
    [
        (1, 0, {"overlap": True}),
        (0, 4, {"control_plane": "zmq"}),
        (1, 4, {"overlap": True, "verify_ranks": False}),
    ],
)
def test_a_rank_is_killed_before_prefill_or_in_decode(
    path: Path, rank: int, steps: int, options: dict[str, Any]
) -> None:
    llm = start(path, **options)
    generations = begin(llm, steps)
    kill(llm, rank)
    assert_all_end(llm, generations, f"rank {rank} was killed by SIGKILL")


def test_a_rank_is_killed_in_a_collective(path: Path) -> None:
    """Rank 1 stands still, so that rank 0 waits for it in the middle of a prefill; then it dies."""
    llm = start(path, overlap=True)
    generations = begin(llm, 0)
    kill(llm, 1, signal.SIGSTOP)
    threading.Timer(1.0, kill, (llm, 1)).start()
    assert_all_end(llm, generations, "rank 1 was killed by SIGKILL")


def test_a_rank_that_stands_still_ends_the_engine_after_the_timeout(path: Path) -> None:
    llm = start(path, distributed_timeout=6.0)  # for a busy machine: ranks load at their own pace
    generations = begin(llm, 3)
    kill(llm, 1, signal.SIGSTOP)
    assert_all_end(llm, generations, "rank 1 does not answer; it is stopped or hangs")
    assert "(rank 0 died: " in str(generations[0].request.error), "the one whose collective has timed out"


@pytest.mark.parametrize("steps", [0, 3])
def test_a_rank_that_stands_still_is_named_long_before_collectives_time_out(path: Path, steps: int) -> None:
    llm = start(path, hang_timeout=2.0, overlap=steps > 0)
    generations = begin(llm, steps)
    kill(llm, 1, signal.SIGSTOP)
    assert_all_end(llm, generations, "rank 1 has not answered for 2 s; it is stopped or hangs")


def test_a_rank_that_stands_still_is_noticed_while_nothing_runs(path: Path) -> None:
    llm = start(path, hang_timeout=2.0)
    time.sleep(3.0)
    assert tokens(llm.generate(PROMPTS, GREEDY)), "ranks at rest are not taken for stopped"
    kill(llm, 0, signal.SIGSTOP)
    assert wait_for(lambda: not ranks_of(psutil.Process()), LIMIT), "nothing is left of either"
    with pytest.raises(EngineDead, match="rank 0 has not answered for 2 s"):
        llm.check()


def test_a_step_may_last_longer_than_a_rank_may_be_silent(path: Path) -> None:
    slow = f"{broken.__name__}:SlowOnce"
    llm = start(path, hang_timeout=1.0, prefill_attention=slow, decode_attention=slow)
    assert tokens(llm.generate(PROMPTS, GREEDY))


def test_ranks_that_hang_in_a_step_are_named_before_the_driver_gives_up(path: Path) -> None:
    hangs = f"{broken.__name__}:HangsInAStep"
    llm = start(path, hang_timeout=1.0, distributed_timeout=5.0, prefill_attention=hangs, decode_attention=hangs)
    assert_all_end(llm, begin(llm, 0), "has made no progress for 6 s; its main loop hangs")


def test_when_all_stand_still_the_driver_tells(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_executor, "_REPORT_SLACK", 0.0)
    llm = start(path)
    generations = begin(llm, 3)
    assert isinstance(llm.executor, RemoteExecutor)
    llm.executor.config = replace(llm.executor.config, distributed_timeout=1.0)
    for rank in range(2):
        kill(llm, rank, signal.SIGSTOP)
    assert_all_end(
        llm, generations, "no answer within 1 s; if the ranks are slow rather than stuck, raise distributed_timeout"
    )


def test_a_rank_is_killed_while_nobody_asks(path: Path) -> None:
    llm = start(path)
    assert tokens(llm.generate(PROMPTS, GREEDY))
    kill(llm, 1)
    assert wait_for(lambda: not ranks_of(psutil.Process()), LIMIT), "the other rank follows although no step runs"
    with pytest.raises(EngineDead, match="rank 1 was killed by SIGKILL"):
        llm.generate(PROMPTS, GREEDY)


@pytest.mark.parametrize("plane", ["shared-memory", "zmq"])
def test_a_rank_is_killed_at_the_start(path: Path, plane: str) -> None:
    def kill_one() -> None:
        assert wait_for(lambda: len(ranks_of(psutil.Process())) == 2, LIMIT)
        time.sleep(0.5)
        ranks_of(psutil.Process())[1].kill()

    killer = threading.Thread(target=kill_one)
    killer.start()
    with pytest.raises(EngineDead, match=r"rank \d was killed by SIGKILL"):
        start(path, control_plane=plane)
    killer.join()


def test_an_error_of_one_rank_is_told(path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    fails = f"{broken.__name__}:FailsOnRank1"
    llm = start(path, prefill_attention=fails, decode_attention=fails)
    with pytest.raises(EngineDead, match=r"rank 1 died: ArithmeticError: the abacus is broken"):
        llm.generate(PROMPTS, GREEDY)
    assert "[rank 1] ArithmeticError: the abacus is broken" in capfd.readouterr().err


def test_ranks_freeze_their_heap_when_they_have_started(path: Path) -> None:
    counts = f"{broken.__name__}:CountsWhatIsFrozen"
    llm = start(path, prefill_attention=counts, decode_attention=counts)
    with pytest.raises(EngineDead, match=r"ArithmeticError: \d{5,} objects are frozen"):
        llm.generate(PROMPTS, GREEDY)


def test_ranks_that_disagree_are_found_out(path: Path) -> None:
    llm = start(path, all_reduce=f"{broken.__name__}:WrongOnRank1")
    with pytest.raises(EngineDead, match="ranks 0 and 1 disagree on the tokens of step 0"):
        llm.generate(PROMPTS, GREEDY)


def test_a_checkpoint_that_cannot_be_loaded_is_the_callers_error(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    (path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match="truncated or corrupt"):
        start(path)


class NoProcessForRank1(subprocess.Popen[bytes]):
    """What the system says to a user who has too many."""

    started = 0

    def __init__(self, *arguments: Any, **options: Any) -> None:
        if NoProcessForRank1.started == 1:
            raise BlockingIOError(errno.EAGAIN, "no process left")
        super().__init__(*arguments, **options)
        NoProcessForRank1.started += 1


def only(available: int) -> Callable[[], tuple[int, int]]:
    """`os.pipe`, for so many pipes."""
    pipe, left = os.pipe, iter(range(available))

    def counted() -> tuple[int, int]:
        if next(left, None) is None:
            raise OSError(errno.EMFILE, "no pipe left")
        return pipe()

    return counted


@pytest.mark.parametrize("lacking", ["first pipe", "last pipe", "socket", "ZeroMQ's socket", "process"])
def test_a_start_that_the_system_refuses_is_told(path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str) -> None:
    def no_store() -> None:
        raise RuntimeError("no socket left")

    def no_bind(socket: zmq.Socket[bytes], address: str) -> None:
        raise zmq.ZMQError(errno.EMFILE, "no socket left")

    control_plane = "shared-memory"
    if lacking == "socket":
        monkeypatch.setattr(remote_executor, "open_store", no_store)
    elif lacking == "ZeroMQ's socket":
        monkeypatch.setattr(zmq.Socket, "bind", no_bind)
        control_plane = "zmq"
    elif lacking == "process":
        monkeypatch.setattr(subprocess, "Popen", NoProcessForRank1)
    else:  # an alarm, a bell for each rank, and each rank's way back
        monkeypatch.setattr(os, "pipe", only(0 if lacking == "first pipe" else 4))
    advice = "if there are too many open files or processes, close some or raise the limits"
    with pytest.raises(EngineDead, match=f"the ranks could not be started: .*no {lacking.split()[-1]} left; {advice}"):
        start(path, control_plane=control_plane)


def test_two_engines_live_side_by_side_and_end_apart(path: Path) -> None:
    """No port, file or memory has a name that another one could have; no port is open to other machines."""
    first, second = start(path, control_plane="zmq"), start(path, control_plane="zmq")
    expected = tokens(first.generate(PROMPTS, GREEDY))
    listening = [
        connection.laddr.ip
        for process in [psutil.Process(), *ranks_of(psutil.Process())]
        for connection in process.net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert set(listening) <= {"127.0.0.1", "::1"}
    first.close()
    first.close()
    with pytest.raises(EngineDead, match="the engine was closed"):
        first.generate([1], GREEDY)
    assert tokens(second.generate(PROMPTS, GREEDY)) == expected
    before = sum(sum(process.cpu_times()[:2]) for process in ranks_of(psutil.Process()))
    time.sleep(1.0)
    assert sum(sum(process.cpu_times()[:2]) for process in ranks_of(psutil.Process())) - before < 0.3, "ranks sleep"
    del second  # whoever forgets `close` leaves nothing behind either


SCRIPT = """
import sys, psutil
from minisgl import LLM
from tests.distributed.generating import ranks_of

llm = LLM({path!r}, device="cpu", num_pages=64, tensor_parallel_size=2, control_plane={plane!r})
print(*(process.pid for process in ranks_of(psutil.Process())), flush=True)
{then}
"""


def run_script(path: Path, plane: str, then: str) -> tuple[subprocess.Popen[str], list[psutil.Process]]:
    """A driver of its own, without a guard around its main part. Returns when its ranks are ready."""
    script = SCRIPT.format(path=str(path), plane=plane, then=then)
    driver = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert driver.stdout is not None
    ranks = [psutil.Process(int(pid)) for pid in driver.stdout.readline().split()]
    assert len(ranks) == 2
    return driver, ranks


@pytest.mark.parametrize("plane", ["shared-memory", "zmq"])
def test_ranks_end_with_a_driver_that_is_killed(path: Path, plane: str) -> None:
    """Even one that stands still. Its files and memory go with it, which `nothing_is_left` finds."""
    driver, ranks = run_script(path, plane, "llm.generate([[1, 2, 3]]); sys.stdin.read()")
    ranks[1].send_signal(signal.SIGSTOP)
    driver.kill()
    driver.wait()
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert not alive
    assert driver.stdout is not None
    driver.stdout.close()


def test_a_script_that_ends_takes_its_ranks_along(path: Path) -> None:
    driver, ranks = run_script(path, "shared-memory", "")
    assert driver.wait(LIMIT) == 0
    _, alive = psutil.wait_procs(ranks, timeout=LIMIT)
    assert not alive
    assert driver.stdout is not None
    driver.stdout.close()
