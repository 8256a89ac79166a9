"""The memory of the worst step is measured with what the engine runs; and kernels are warmed up on the dummy page."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from minisgl.batch import Batch
from minisgl.config import EngineConfig
from minisgl.engine.memory import MemoryPeak, pages_that_fit, warm_up_kernels
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.sampler import SampledTokens
from minisgl.engine.sampling import DeviceSampling
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint

CPU = torch.device("cpu")
MAX_SEQ_LEN = 40
LONGEST = MAX_SEQ_LEN - 1  # the step samples a token, for which there must be room


def make(tmp_path: Path, **options: Any) -> LLM:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    return LLM(path, device="cpu", page_size=4, max_seq_len=MAX_SEQ_LEN, **options)


def sizing(runner: ModelRunner, config: EngineConfig, **sizes: int) -> int:
    return pages_that_fit(
        config, runner, **{"model_bytes": 0, "graph_bytes": 0, "free_before": 0, "page_bytes": 1024, **sizes}
    )


@pytest.mark.parametrize(
    ("max_prefill_tokens", "max_running_requests", "q_lens"),
    [
        (8, 3, [8]),  # a chunk is the limit
        (100, 3, [LONGEST, LONGEST, 22]),  # two whole prompts, and a chunk of a third
        (10_000, 3, [LONGEST] * 3),  # one for each slot
        (160, 7, [*[LONGEST] * 4, 4]),
    ],
)
def test_the_peak_is_that_of_real_steps_with_most_tokens_and_most_rows(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    max_prefill_tokens: int,
    max_running_requests: int,
    q_lens: list[int],
) -> None:
    """With the engine's attention over its KV cache and its sampler, which has to sort, count and report."""
    runner = make(tmp_path, num_pages=1, max_running_requests=max_running_requests).engine.runner
    watched, steps = [], []

    @contextmanager
    def measure(device: torch.device) -> Iterator[MemoryPeak]:
        watched.append(device)
        yield MemoryPeak()
        watched.pop()

    def sample(logits: torch.Tensor, inputs: DeviceSampling, history: Any) -> SampledTokens:
        asked = [inputs.random, inputs.top, inputs.penalties, inputs.logprobs, history]
        steps.append((list(watched), len(logits), all(each is not None for each in asked)))
        return sampler(logits, inputs, history)

    sampler = runner.sampler.sample
    attend = MagicMock(wraps=runner.attention.forward)
    plan = MagicMock(wraps=runner.attention.plan)
    monkeypatch.setattr("minisgl.engine.memory.measure_peak_memory", measure)
    monkeypatch.setattr(runner.sampler, "sample", sample)
    monkeypatch.setattr(runner.attention, "forward", attend)
    monkeypatch.setattr(runner.attention, "plan", plan)
    config = EngineConfig(
        memory_formula="peak",
        memory_ratio=1.0,
        max_prefill_tokens=max_prefill_tokens,
        max_running_requests=max_running_requests,
    )
    sizing(runner, config)
    largest, widest = (call.args[0] for call in plan.call_args_list)
    assert largest.q_lens.tolist() == q_lens
    assert widest.num_rows == min(max_running_requests, max(1, sum(q_lens) // 16))
    assert attend.call_count == 2 * len(runner.model.model.layers)
    assert steps == [([CPU], batch.num_rows, True) for batch in (largest, widest)]


class Card:
    """A runner on a GPU that is not there."""

    device = torch.device("cuda", 0)


def test_formula_a_leaves_room_for_a_step_that_needs_more_than_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1,000 kB, 900 are for model and pages. A step that needs 100 fits beside them; of 250 it takes 150."""
    runner: Any = Card()
    config = EngineConfig(memory_ratio=0.9)
    for needed, expected in ((100_000, 800), (250_000, 650)):
        peak = MemoryPeak(peak=needed + 5000, current=5000)
        monkeypatch.setattr("minisgl.engine.memory.measure_worst_steps", lambda *arguments, peak=peak: peak)
        assert sizing(runner, config, free_before=1_000_000, model_bytes=100_000, page_bytes=1000) == expected


PROMPTS = [[5, 6, 7] * 6, [9], list(range(20))]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=12, ignore_eos=True)


@pytest.fixture
def llm(tmp_path: Path) -> LLM:
    return make(tmp_path, num_pages=16, max_running_requests=3)


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
