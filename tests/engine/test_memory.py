"""Formula B measures the worst step that there can be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from minisgl.batch import Batch, DeviceBatch
from minisgl.config import EngineConfig
from minisgl.engine.memory import MemoryPeak, pages_that_fit, warm_up_kernels
from minisgl.engine.model_runner import ModelRunner
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint

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
        graph_bytes=0,
        free_before=0,
        max_seq_len=MAX_SEQ_LEN,
        page_bytes=1024,
        device=CPU,
    )
    assert model.steps == [(True, [position for q_len in q_lens for position in range(q_len)])]


PROMPTS = [[5, 6, 7] * 6, [9], list(range(20))]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    return LLM(path, device="cpu", num_pages=16, page_size=4, max_running_requests=3, max_seq_len=40)


@pytest.mark.parametrize("max_prefill_tokens", [8, 100, 10_000])
def test_the_largest_step_is_run_and_a_few_tokens_behind_cached_ones(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, max_prefill_tokens: int
) -> None:
    batches: list[Batch] = []
    run = ModelRunner.run
    monkeypatch.setattr(ModelRunner, "run", lambda self, batch, rows: batches.append(batch) or run(self, batch, rows))
    warm_up_kernels(llm.engine.runner, max_prefill_tokens)
    assert max(batch.num_tokens for batch in batches) == min(max_prefill_tokens, 3 * 39)
    assert max(batch.seq_lens.max() for batch in batches) <= 39
    assert any((batch.seq_lens > batch.q_lens).all() for batch in batches)
    short = max(batch.num_rows for batch in batches if batch.q_lens.max() <= 16)
    assert short == min(3, max(1, max_prefill_tokens // 16))
    assert all(batch.num_decode == 0 for batch in batches)


def test_what_requests_own_is_left_alone(llm: LLM) -> None:
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    state, cache = llm.engine.runner.state, llm.engine.kv_cache
    owned = [state.tokens[:-1], state.page_table, cache.k[:, :-1], cache.v[:, :-1]]
    before = [tensor.clone() for tensor in owned]
    warm_up_kernels(llm.engine.runner, 64)
    for tensor, earlier in zip(owned, before, strict=True):
        assert torch.equal(tensor, earlier)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
