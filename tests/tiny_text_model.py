"""A tiny random Llama with a real tokenizer and chat template, and executors that misbehave or speak by rote."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from minisgl.batch import Batch, PendingStep, StepLauncher, StepResult
from minisgl.config import EngineConfig
from minisgl.core import EngineCore
from minisgl.engine.build import build_engine
from minisgl.llm import LLM
from tests.model_zoo import tiny_checkpoint
from tests.tiny_tokenizer import byte_level, save


def text_checkpoint(directory: Path, eos: Sequence[int] = (), **overrides: Any) -> Path:
    """Write a checkpoint of 300 tokens that ends at the ids ``eos`` (its tokenizer's own is ``</s>``, id 1)."""
    raw = byte_level()
    path, _ = tiny_checkpoint(directory, "LlamaForCausalLM", vocab_size=raw.get_vocab_size(), **overrides)
    save(raw, path)
    generation_config = path / "generation_config.json"
    fields = json.loads(generation_config.read_text())
    generation_config.write_text(json.dumps({**fields, "eos_token_id": list(eos) or [1]}))
    return path


class Done:
    """A step that is done already."""

    def __init__(self, result: StepResult) -> None:
        self.result = result

    def wait(self) -> StepResult:
        return self.result


class Scripted:
    """An executor that answers every request with the same tokens, so that a test decides what the model says.

    Args:
        tokens: of the answer; what follows is the last one again.
    """

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = np.asarray(tokens, dtype=np.int32)

    def launch(self, batch: Batch) -> Done:
        return Done(StepResult(self.tokens[np.minimum(batch.output_index, len(self.tokens) - 1)]))


class Failing:
    """An executor that raises ``error`` at its ``at``-th step, counted from 0, and is fine before and after.

    If ``late``, the step's `wait` raises, and the launch does nothing.
    """

    def __init__(self, executor: StepLauncher, at: int, error: BaseException, late: bool = False) -> None:
        self.executor = executor
        self.at = at
        self.error = error
        self.late = late
        self.steps = 0

    def launch(self, batch: Batch) -> PendingStep:
        self.steps += 1
        if self.steps != self.at + 1:
            return self.executor.launch(batch)
        if self.late:
            return self
        raise self.error

    def wait(self) -> StepResult:
        raise self.error


class DirectedExecutor:
    """The engine of a tiny model, whose steps a test may have computed by another ``launcher``."""

    def __init__(self, config: EngineConfig) -> None:
        self.engine = build_engine(config, Path(config.model))
        self.launcher: StepLauncher = self.engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def launch(self, batch: Batch) -> PendingStep:
        return self.launcher.launch(batch)


def directed_llm(path: str | Path, **options: Any) -> LLM:
    """An `LLM` over a `DirectedExecutor`."""
    return LLM(path, executor=DirectedExecutor(EngineConfig.from_options(str(path), options)), **options)


def assert_idle_and_clean(llm: LLM | EngineCore) -> None:
    """No request is left, and all pages are free or can be evicted."""
    llm.scheduler.check()
    memory = llm.scheduler.memory
    assert not llm.scheduler.has_work
    assert len(llm.scheduler.table) == 0
    assert memory.available == memory.num_pages
    assert not getattr(llm, "_generations", None)
