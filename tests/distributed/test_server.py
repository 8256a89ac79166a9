"""The server over two ranks: it answers, and when one of them dies it says so and ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

from tests.distributed.generating import ranks_of
from tests.server.test_serve import client_of, flags
from tests.tiny_text_model import text_checkpoint


def test_an_idle_server_ends_with_a_rank(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-m", "minisgl.serve", "--tp", "2", *flags(text_checkpoint(tmp_path))]
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
        ranks[1].kill()
        assert server.wait(30) == 1, "although nobody asked for anything"
        assert not psutil.wait_procs(ranks, 30)[1]
        assert "rank 1 was killed by SIGKILL" in log.read_text()
    finally:
        server.kill()
        server.wait()
