"""A real server on a free port, in a thread, over a tiny model whose steps a test can hold back."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import httpx
import openai

from minisgl.config import EngineConfig
from minisgl.core import EngineCore
from minisgl.scheduler.scheduler import StepOutput
from minisgl.server.async_engine import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.in_process import InProcessEngine
from minisgl.server.launch import Server, bind
from minisgl.server.process_engine import ProcessEngine
from minisgl.server.scheduler_worker import engine_views
from tests.model_zoo import tiny_checkpoint
from tests.tiny_text_model import DirectedExecutor
from tests.tiny_tokenizer import TEMPLATE, byte_level, save

MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
PROMPT = "the cat and the dog, 12 of them"
TINY: dict[str, Any] = {"page_size": 4, "num_pages": 64, "device": "cpu"}

T = TypeVar("T")


def chat_checkpoint(directory: Path, template: str = TEMPLATE) -> Path:
    """A tiny random Llama with a byte-level tokenizer and a chat template, by default one that rejects ``tool``."""
    path, _ = tiny_checkpoint(directory, "LlamaForCausalLM", vocab_size=300)
    return save(byte_level(), path, template)


def wait_until(condition: Callable[[], bool], timeout: float = 20.0) -> None:
    """Poll ``condition`` until it holds; a test that waits in vain fails."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.005)


def in_background(call: Callable[[], object]) -> Callable[[], object]:
    """Start ``call`` in a thread; the function returned waits for it and gives its result, or the error it raised."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run)
    thread.start()

    def result() -> object:
        thread.join(timeout=200)
        assert not thread.is_alive(), "waited in vain"
        return results[0]

    return result


class Gate:
    """How many steps an engine may run: ``allowed`` more; None is no limit."""

    def __init__(self) -> None:
        self.allowed: int | None = None
        self.error: Exception | None = None
        """Raised in place of the next step, outside of what a scheduler could contain."""
        self.lock = threading.Lock()
        """Held by a test, it makes the engine's thread stand still in the middle of a step."""


class GatedCore(EngineCore):
    """An engine whose steps pass a gate."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config, DirectedExecutor(config))
        self.gate = Gate()

    def step(self) -> StepOutput:
        with self.gate.lock:
            if self.gate.error is not None:
                raise self.gate.error
            if self.gate.allowed == 0:
                time.sleep(0.001)
                return StepOutput()
            if self.gate.allowed is not None:
                self.gate.allowed -= 1
            return super().step()


class ServerThread:
    """A server in a thread, over an engine that is ready. ``model`` is its model's name."""

    def __init__(self, engine: AsyncEngine, config: ServerConfig) -> None:
        self.model = engine.model
        self.engine = engine
        self.server = Server(engine, config)
        listener = bind("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self._thread = threading.Thread(target=self.server.run, args=([listener],))

    def __enter__(self) -> Self:
        self._thread.start()
        wait_until(lambda: self.server.started)
        self.http = httpx.Client(base_url=self.url, timeout=60)
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.http.close()
        self.client.close()
        self.server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def idle(self) -> bool:
        """Whether nothing is left of any request."""
        raise NotImplementedError

    def chat(self, **fields: Any) -> Any:
        """A chat completion, greedy unless told otherwise."""
        defaults = {"model": self.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
        return self.client.chat.completions.create(**{**defaults, **fields})

    def complete(self, **fields: Any) -> Any:
        """A completion, greedy unless told otherwise."""
        defaults = {"model": self.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        return self.client.completions.create(**{**defaults, **fields})


class RunningServer(ServerThread):
    """Its engine is in the same process, and a test may hold its steps back."""

    def __init__(self, checkpoint: Path, config: ServerConfig | None = None, **options: Any) -> None:
        self.core = GatedCore(EngineConfig(model=str(checkpoint), **{**TINY, **options}))
        self.gate = self.core.gate
        config = config or ServerConfig()
        engine = InProcessEngine(self.core, engine_views(self.core), config)
        super().__init__(engine, config)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.gate.allowed = None
        super().__exit__(kind, error, where)

    def idle(self) -> bool:
        """Whether the engine has nothing to do and has all its pages back."""
        memory = self.core.scheduler.memory
        return not self.core.scheduler.has_work and memory.available == memory.num_pages


class ProcessServer(ServerThread):
    """Its engine is in processes of its own."""

    engine: ProcessEngine

    def __init__(self, checkpoint: Path, server: ServerConfig, **options: Any) -> None:
        config = EngineConfig(model=str(checkpoint), **{**TINY, **options})
        super().__init__(ProcessEngine(config, server), server)

    def states(self) -> dict[str, int]:
        """What each process keeps of requests."""
        return dict(self.call(self.engine.ask()).states)

    def idle(self) -> bool:
        """Whether no process keeps anything."""
        return not any(self.states().values())

    def call(self, work: Coroutine[Any, Any, T], timeout: float = 30.0) -> T:
        """Await ``work`` in the server's event loop."""
        return asyncio.run_coroutine_threadsafe(work, self.engine._loop).result(timeout)
