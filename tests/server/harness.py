"""A real server on a free port, in a thread, over a tiny model whose steps a test can hold back."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx
import openai

from minisgl import LLM
from minisgl.scheduler import StepOutput
from minisgl.server import AsyncEngine
from minisgl.server.config import ServerConfig
from minisgl.server.launch import Server, bind
from tests.model_zoo import tiny_checkpoint
from tests.tokenizer.tiny import TEMPLATE, byte_level, save

MESSAGES: list[Any] = [{"role": "user", "content": "the quick brown fox jumps over the lazy dog"}]
PROMPT = "the cat and the dog, 12 of them"


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
        thread.join(timeout=30)
        return results[0]

    return result


class Gate:
    """Stands before an engine's steps. ``allowed`` more may pass; None is no limit."""

    def __init__(self, llm: LLM) -> None:
        self.allowed: int | None = None
        self.error: Exception | None = None
        """Raised in place of the next step, outside of what a scheduler could contain."""
        self.lock = threading.Lock()
        """Held by a test, it makes the engine's thread stand still in the middle of a step."""
        self._step = llm.loop.step
        llm.loop.step = self.step

    def step(self) -> StepOutput:
        with self.lock:
            return self._pass()

    def _pass(self) -> StepOutput:
        if self.error is not None:
            raise self.error
        if self.allowed == 0:
            time.sleep(0.001)
            return StepOutput()
        if self.allowed is not None:
            self.allowed -= 1
        return self._step()


class RunningServer:
    """A server in a thread. ``model`` is its model's name, ``options`` are the engine's."""

    def __init__(self, checkpoint: Path, config: ServerConfig | None = None, **options: Any) -> None:
        self.model = str(checkpoint)
        self.llm = LLM(self.model, **{"page_size": 4, "num_pages": 64, "device": "cpu", **options})
        self.gate = Gate(self.llm)
        self.engine = AsyncEngine(self.llm)
        self.server = Server(self.engine, config)
        listener = bind("127.0.0.1", 0)
        self.address = listener.getsockname()
        self.url = "http://{}:{}".format(*self.address)
        self._thread = threading.Thread(target=self.server.run, args=([listener],))

    def __enter__(self) -> RunningServer:
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
        self.gate.allowed = None
        self.server.should_exit = True
        self._thread.join(timeout=30)
        assert not self._thread.is_alive()

    def idle(self) -> bool:
        """Whether the engine has nothing to do and has all its pages back."""
        memory = self.llm.scheduler.memory
        return not self.llm.scheduler.has_work and memory.available == memory.num_pages

    def chat(self, **fields: Any) -> Any:
        """A chat completion, greedy unless told otherwise."""
        defaults = {"model": self.model, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
        return self.client.chat.completions.create(**{**defaults, **fields})

    def complete(self, **fields: Any) -> Any:
        """A completion, greedy unless told otherwise."""
        defaults = {"model": self.model, "prompt": PROMPT, "temperature": 0, "max_tokens": 24}
        return self.client.completions.create(**{**defaults, **fields})
