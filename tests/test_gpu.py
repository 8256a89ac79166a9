"""The same engine on a CUDA device: the same tokens, and nothing left behind. Run with ``pytest -m gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minisgl import LLM, SamplingParams
from tests.model_zoo import tiny_checkpoint
from tests.test_metamorphic import Oracle, assert_answers, make_oracle, run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("cache", ["radix", "block-hash", "none"])
@pytest.mark.parametrize("composition", ["prefill-first", "mixed"])
@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_cuda_gives_the_tokens_of_transformers(oracle: Oracle, cache: str, composition: str, memory: str) -> None:
    outputs = run(oracle, cache, 16, composition, memory, 64, device="cuda")
    assert_answers(oracle, outputs, cache, memory)


def test_auto_takes_the_gpu_and_the_checkpoints_dtype(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    llm = LLM(path, num_pages=64)
    assert llm.engine.device.type == "cuda"
    assert llm.engine.dtype == llm.engine.model_config.dtype
    assert llm.engine.kv_cache.k.is_cuda


def test_bfloat16_generates_with_every_sampling_feature(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    llm = LLM(path, device="cuda", dtype="bfloat16", num_pages=256)
    params = [
        SamplingParams(max_tokens=8, temperature=0.0, logprobs=3),
        SamplingParams(max_tokens=8, top_k=5, top_p=0.9, seed=1),
        SamplingParams(max_tokens=8, min_p=0.1, repetition_penalty=1.2, presence_penalty=0.5, seed=2),
        SamplingParams(max_tokens=8, logit_bias={7: 5.0}, min_tokens=4, stop_token_ids=[7], seed=3),
    ]
    outputs = llm.generate([[1, 2, 3]] * len(params), params)
    assert all(1 <= len(output.token_ids) <= 8 for output in outputs)
    assert outputs[0].logprobs is not None
    assert len(outputs[0].logprobs[0].top) == 3
    assert len(outputs[3].token_ids) >= 5


@pytest.mark.parametrize("formula", ["free", "peak"])
def test_default_memory_fits_the_card(tmp_path: Path, formula: str) -> None:
    """At the default share of memory a full batch of the longest prompts runs."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    llm = LLM(path, device="cuda", memory_formula=formula, max_running_requests=16)
    _, total = torch.cuda.mem_get_info()
    assert 0.5 * total < llm.engine.num_pages * llm.engine.page_bytes < 0.95 * total
    longest = llm.max_seq_len - 4
    outputs = llm.generate([[i % 200] * longest for i in range(16)], SamplingParams(max_tokens=4, ignore_eos=True))
    assert [output.finish_reason for output in outputs] == ["length"] * 16
