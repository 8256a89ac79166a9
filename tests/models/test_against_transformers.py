"""The oracle: logits of every architecture equal those of transformers, however the work is cut into steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from minisgl.models import ModelConfig, load_model
from tests.model_zoo import ARCHITECTURES, Variant, hf_logits, random_tokens, run_dense
from tests.paged_runner import PagedRunner

CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-8}


@pytest.fixture(params=ARCHITECTURES, ids=lambda variant: variant.name)
def variant(request: pytest.FixtureRequest) -> Variant:
    chosen: Variant = request.param
    return chosen


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    chosen: torch.dtype = request.param
    return chosen


@pytest.fixture
def pair(variant: Variant, dtype: torch.dtype, tmp_path: Path) -> tuple[PreTrainedModel, torch.nn.Module, ModelConfig]:
    path, hf = variant.checkpoint(tmp_path)
    config = ModelConfig.from_dir(path)
    if dtype == torch.float64:
        _make_double(hf)
    return hf, load_model(path, config, dtype, CPU), config


def _make_double(hf: PreTrainedModel) -> None:
    """transformers rounds to float32 in its norms and routers even in a float64 model; lift that for the oracle."""
    hf.double()
    for module in hf.modules():
        if type(module).__name__.endswith("RMSNorm"):
            _replace_forward(module, lambda x, m=module: F.rms_norm(x, m.weight.shape, m.weight, m.variance_epsilon))
        if type(module).__name__.endswith("TopKRouter"):
            _replace_forward(module, lambda x, m=module: _route(m, x))


def _replace_forward(module: torch.nn.Module, forward: Any) -> None:
    module.forward = forward


def _route(router: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    logits = F.linear(x, router.weight)
    weights, experts = logits.softmax(-1).topk(router.top_k)
    return logits, weights / weights.sum(-1, keepdim=True) if router.norm_topk_prob else weights, experts


def assert_equal(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    assert ours.dtype == dtype
    assert ours.shape == theirs.shape
    assert float((ours - theirs).abs().max()) < TOLERANCE[dtype]


def test_whole_prompts(pair: tuple[PreTrainedModel, torch.nn.Module, ModelConfig], dtype: torch.dtype) -> None:
    hf, model, config = pair
    prompts = random_tokens(23, 1, 9)
    paged = PagedRunner.of(model, config, dtype, rows=3, max_len=32, page_size=4).step(dict(enumerate(prompts)))
    for prompt, dense_logits, paged_logits in zip(prompts, run_dense(model, *prompts), paged, strict=True):
        theirs = hf_logits(hf, prompt)
        assert_equal(dense_logits, theirs, dtype)
        assert_equal(paged_logits, theirs, dtype)


@pytest.mark.parametrize("page_size", [1, 16])
def test_chunks_decodes_and_mixed_steps(
    pair: tuple[PreTrainedModel, torch.nn.Module, ModelConfig], dtype: torch.dtype, page_size: int
) -> None:
    hf, model, config = pair
    a, b, c = random_tokens(30, 21, 12)
    runner = PagedRunner.of(model, config, dtype, rows=3, max_len=32, page_size=page_size)
    steps = [
        {0: a[:7]},
        {0: a[7:14], 1: b[:3]},
        {1: b[3:4], 0: a[14:27], 2: c[:11]},  # decode, two prefills with and without a prefix
        {0: a[27:28], 1: b[4:5], 2: c[11:12]},
        {1: b[5:21], 0: a[28:29]},
        {0: a[29:30]},
    ]
    got: dict[int, list[torch.Tensor]] = {0: [], 1: [], 2: []}
    for fed in steps:
        for slot, logits in zip(fed, runner.step(fed), strict=True):
            got[slot].append(logits)
    for slot, tokens in enumerate((a, b, c)):
        assert_equal(torch.cat(got[slot]), hf_logits(hf, tokens), dtype)
