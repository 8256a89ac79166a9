"""What steady decode steps ask of the device beside the replay of a graph: no memory, and one copy from the host."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import DeviceType, ProfilerActivity, profile

from minisgl.batch import Batch
from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint

pytestmark = pytest.mark.gpu


STEPS = 20
"""In which a row of 16 tokens a page gets a page or two."""
WARM_UP = 8


Prompts = Sequence[list[int]]
FEW: Prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
COMMON = [token % 200 for token in range(1024)]
GROUP: Prompts = [[*COMMON, row, row + 1] for row in range(12)]
"""Eleven of them save 11,264 tokens, enough for the cascade backend to treat them as a group."""


IN_THE_GRAPH = SamplingParams(max_tokens=60, ignore_eos=True, temperature=0.7, seed=1)
AFTER_THE_REPLAY = SamplingParams(
    max_tokens=60, ignore_eos=True, temperature=0.7, seed=1, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.3
)


class Steady:
    """An engine whose requests all decode, and will for more than `STEPS` steps."""

    def __init__(
        self, directory: Path, monkeypatch: pytest.MonkeyPatch, prompts: Prompts, params: SamplingParams
    ) -> None:
        path, _ = tiny_checkpoint(directory, "Qwen3ForCausalLM", head_dim=32, max_position_embeddings=2048)
        self.llm = LLM(path, device="cuda", dtype="bfloat16", num_pages=1024, graph_batches=(4, 16))
        self.keys: list[Any] = []
        """Of each step since `watch`: the attention backend's name for it; False if it was not replayed."""
        self.llm.generate([COMMON], SamplingParams(max_tokens=1))  # from here on it is cached
        for prompt in prompts:
            for generation in self.llm.prepare(prompt, params):
                self.llm.submit(generation)
        for _ in range(WARM_UP):
            self.llm.step()
        self.watch(monkeypatch)

    def watch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """From now on, note what becomes of each step."""
        runner = self.llm.engine.runner
        assert isinstance(runner, CudaGraphRunner)
        plan, size_for = runner.attention.plan, runner.size_for

        def noted_size(batch: Batch) -> int | None:
            if (size := size_for(batch)) is None:
                self.keys.append(False)
            return size

        def noted_plan(batch: Batch, inputs: Any) -> Any:
            key = plan(batch, inputs)
            self.keys.append(key if (batch.num_rows, key) in runner.graphs else False)
            return key

        monkeypatch.setattr(runner, "size_for", noted_size)
        monkeypatch.setattr(runner.attention, "plan", noted_plan)

    def run(self) -> None:
        """`STEPS` steps, and wait for the last one."""
        for _ in range(STEPS):
            self.llm.step()
        torch.cuda.synchronize()


@pytest.mark.parametrize(("prompts", "key"), [(FEW, None), (GROUP, "shared")], ids=["apart", "in a group"])
def test_replayed_steps_allocate_nothing_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Prompts, key: str | None
) -> None:
    steady = Steady(tmp_path, monkeypatch, prompts, IN_THE_GRAPH)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    steady.run()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert steady.keys == [key] * STEPS


@pytest.mark.parametrize(
    ("prompts", "key", "params"),
    [(FEW, None, IN_THE_GRAPH), (FEW, None, AFTER_THE_REPLAY), (GROUP, "shared", IN_THE_GRAPH)],
    ids=["sampled in the graph", "sampled after the replay", "in a group"],
)
def test_the_host_sends_one_copy_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: Prompts, key: str | None, params: SamplingParams
) -> None:
    steady = Steady(tmp_path, monkeypatch, prompts, params)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as recorded:
        steady.run()
    on_device = [event.name for event in recorded.events() or [] if event.device_type == DeviceType.CUDA]
    assert sum("Memcpy HtoD" in name for name in on_device) == STEPS
    assert steady.keys == [key] * STEPS
