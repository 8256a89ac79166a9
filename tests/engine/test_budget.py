"""Formula B measures the worst step that there can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from minisgl.core import DeviceBatch, EngineConfig
from minisgl.engine.memory import MemoryPeak, pages_that_fit

CPU = torch.device("cpu")
MAX_SEQ_LEN = 40


class Watched(torch.nn.Module):
    """A model that notes the positions of the tokens that it is fed, and whether memory is being watched then."""

    def __init__(self) -> None:
        super().__init__()
        self.memory_is_watched = False
        self.steps: list[tuple[bool, list[int]]] = []

    def forward(self, inputs: DeviceBatch) -> None:
        self.steps.append((self.memory_is_watched, inputs.positions.tolist()))

    @contextmanager
    def measure_peak_memory(self, device: torch.device) -> Iterator[MemoryPeak]:
        self.memory_is_watched = True
        yield MemoryPeak()
        self.memory_is_watched = False


@pytest.mark.parametrize(
    ("max_prefill_tokens", "max_running_requests", "q_lens"),
    [
        (8, 3, [8]),  # a chunk is the limit
        (100, 3, [MAX_SEQ_LEN, MAX_SEQ_LEN, 20]),  # two whole prompts, and a chunk of a third
        (10_000, 3, [MAX_SEQ_LEN] * 3),  # one for each slot
        (160, 7, [MAX_SEQ_LEN] * 4),
    ],
)
def test_the_peak_is_that_of_the_largest_legal_prefill(
    monkeypatch: pytest.MonkeyPatch, max_prefill_tokens: int, max_running_requests: int, q_lens: list[int]
) -> None:
    model = Watched()
    monkeypatch.setattr("minisgl.engine.memory.measure_peak_memory", model.measure_peak_memory)
    config = EngineConfig(
        memory_formula="peak",
        memory_ratio=1.0,
        max_prefill_tokens=max_prefill_tokens,
        max_running_requests=max_running_requests,
    )
    pages_that_fit(
        config,
        model,
        model_bytes=0,
        runner_bytes=0,
        free_before=0,
        max_seq_len=MAX_SEQ_LEN,
        page_bytes=1024,
        device=CPU,
    )
    assert model.steps == [(True, [position for q_len in q_lens for position in range(q_len)])]
