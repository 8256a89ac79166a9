"""Steps before the first request touch nothing but the dummy slot and the dummy page."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from minisgl.core import Batch
from minisgl.engine.runner import ModelRunner
from minisgl.engine.warm_up import warm_up_kernels
from tests.model_zoo import tiny_checkpoint

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
