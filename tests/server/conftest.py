from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from minisgl.llm import LLM
from minisgl.server.config import ServerConfig
from tests.server.harness import ProcessServer, RunningServer, ServerThread, chat_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_checkpoint(tmp_path_factory.mktemp("server"))


@pytest.fixture(scope="session")
def reference(checkpoint: Path) -> LLM:
    """The same model, offline."""
    return LLM(str(checkpoint), page_size=4, num_pages=256, device="cpu")


@pytest.fixture(scope="session")
def server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server that all tests share, which must be idle again after each of them. Unlike the reference, it overlaps."""
    with RunningServer(checkpoint, overlap=True) as running:
        yield running


@pytest.fixture(scope="session")
def processes(checkpoint: Path) -> Iterator[ProcessServer]:
    """The same server with its engine in processes, two of which tokenize."""
    options = ServerConfig(tokenizer_workers=2)
    with ProcessServer(checkpoint, options, overlap=True, max_queued_requests=2000) as running:
        yield running


@pytest.fixture(params=["server", "processes"])
def either(request: pytest.FixtureRequest) -> ServerThread:
    """What both kinds of server must do alike."""
    running: ServerThread = request.getfixturevalue(request.param)
    return running


@pytest.fixture
def own_server(checkpoint: Path) -> Iterator[RunningServer]:
    """A server for one test alone, with a queue of two requests and one that runs."""
    with RunningServer(checkpoint, max_queued_requests=2, max_running_requests=1) as running:
        yield running
