"""The server over two ranks: it answers, and when one of them dies or stands still it says so and ends."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.distributed.generating import ranks_of
from tests.server.test_serve import client_of, flags
from tests.tiny_text_model import text_checkpoint


@pytest.mark.parametrize(
    ("number", "verdict"),
    [(signal.SIGKILL, "was killed by SIGKILL"), (signal.SIGSTOP, "has not answered for 3 s; it is stopped or hangs")],
)
def test_an_idle_server_ends_with_a_rank(tmp_path: Path, number: signal.Signals, verdict: str) -> None:
    log = tmp_path / "log"
    command = [
        sys.executable,
        "-m",
        "minisgl.serve",
        "--tp",
        "2",
        "--hang-timeout",
        "3",
        *flags(text_checkpoint(tmp_path)),
    ]
    with log.open("w") as stream:
        server = subprocess.Popen(command, stderr=stream, text=True)
    try:
        with client_of(log, process=server) as client:
            model = client.models.list().data[0].id
            answer = client.completions.create(model=model, prompt="one two", max_tokens=5, temperature=0)
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        ranks = ranks_of(psutil.Process(server.pid))
        assert len(ranks) == 2
        ranks[1].send_signal(number)
        assert server.wait(30) == 1, "although nobody asked for anything"
        assert not psutil.wait_procs(ranks, 30)[1]
        assert f"rank 1 {verdict}" in log.read_text()
    finally:
        server.kill()
        server.wait()
