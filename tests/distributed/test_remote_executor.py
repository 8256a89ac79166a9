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
import torch

from minisgl.config import EngineConfig
from minisgl.distributed.communicator import TorchCommunicator
from minisgl.distributed.messages import Endpoint, RankOptions
from minisgl.distributed.peer_all_reduce import PeerAllReduce
from minisgl.distributed.remote_executor import RankProcesses
from minisgl.errors import EngineDead
from minisgl.layers.sharding import Communicator
from minisgl.llm import LLM
from tests.distributed import broken
from tests.distributed.generating import GREEDY, OPTIONS, PROMPTS, step_for_ever, tokens, wait_for
from tests.distributed.ranks import on_ranks
from tests.model_zoo import tiny_checkpoint

Start = Callable[..., RankProcesses]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts so many ranks, each of which runs a shell script."""
    started: list[RankProcesses] = []

    def start_ranks(script: str, size: int = 1) -> RankProcesses:
        program = tmp_path / "rank"
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o700)
        monkeypatch.setattr(sys, "executable", str(program))
        ranks = RankProcesses()
        started.append(ranks)
        with open(os.devnull, "wb") as reports:
            told = {"path": "", "model_config": b"", "store_port": 0, "reports": reports.fileno(), "threads": 1}
            told |= {"config": EngineConfig(), "endpoint": Endpoint("nowhere")}
            ranks.start([RankOptions(name=f"rank-{rank}", rank=rank, **told) for rank in range(size)], None)
        return ranks

    yield start_ranks
    for ranks in started:
        ranks.close()


class EndsBeforeItReads(subprocess.Popen[bytes]):
    """A process whose parent is slow."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.wait()


def test_a_rank_that_ends_before_it_has_read_its_setup_is_noticed(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", EndsBeforeItReads)
    ranks = start("exit 3")
    assert wait_for(lambda: ranks.exit_reason is not None, 10.0)
    assert ranks.exit_reason == "rank 0 ended with exit code 3"


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
    ranks = start(PARENT.format(python=sys.executable, apart=apart), size=2)
    assert wait_for(lambda: len(list(children.iterdir())) == 2, 20.0)
    processes = [psutil.Process(int(child.name)) for child in children.iterdir()]
    try:
        os.kill(ranks.children[1].pid, number)
        assert wait_for(lambda: ranks.exit_reason is not None, 10.0)
        assert ranks.exit_reason == f"rank 1 {verdict}"
        begun = time.monotonic()
        ranks.close()
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
    ranks = start("read setup; echo calculating; echo the abacus is broken; exit 3")
    assert wait_for(lambda: ranks.children[0].exit_code is not None, 10.0)
    time.sleep(0.3)
    terminal.may_show.set()
    assert wait_for(lambda: ranks.exit_reason is not None, 10.0)
    assert ranks.exit_reason == "rank 0 ended with exit code 3: the abacus is broken"


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "LlamaForCausalLM")[0]


def start_peers(path: Path, communicator: str) -> LLM:
    """Two ranks that report as they do in use: rank 0 alone."""
    options = {"num_pages": 64, "tensor_parallel_size": 2, "all_reduce": f"{broken.__name__}:{communicator}"}
    return LLM(path, **{**OPTIONS, **options, "verify_ranks": False})


@pytest.mark.parametrize("rank", [0, 1])
def test_no_token_of_such_a_step_is_reported_whichever_rank_it_was(path: Path, rank: int) -> None:
    """And soon: a rank says so itself, while the others may have to wait for it for minutes."""
    expected = tokens(LLM(path, **OPTIONS, num_pages=64).generate(PROMPTS, GREEDY))
    with start_peers(path, f"rank_{rank}_loses") as llm:
        generations = [generation for prompt in PROMPTS for generation in llm.prepare(prompt, GREEDY)]
        for generation in generations:
            llm.submit(generation)
        with pytest.raises(EngineDead, match=f"rank {rank} died: rank {rank} waited in vain for another rank"):
            step_for_ever(llm)
        assert [generation.request.output for generation in generations] == [right[:2] for right in expected]


def test_ranks_whose_warm_up_was_nonsense_do_not_report_for_duty(path: Path) -> None:
    with pytest.raises(EngineDead, match=r"rank ([01]) died: rank \1 waited in vain for another rank"):
        start_peers(path, "loses_while_it_starts")


def test_every_gather_ends_with_a_barrier() -> None:
    """Only that tells a rank whose own sums were right that another one has gathered nonsense."""
    heard: list[str] = []

    class Peers(PeerAllReduce):
        def __init__(self) -> None:
            pass

        def barrier(self) -> None:
            heard.append("barrier")

    def gather(ranks: Communicator) -> None:
        assert ranks.all_gather(torch.ones(2, 3)).tolist() == [[1.0] * 3] * 2

    on_ranks(1, gather, lambda group, device: TorchCommunicator(group, device, Peers()))
    assert heard == ["barrier"]
