"""Every kind of model in an engine, with the options that it chooses by itself: on a GPU graphs, kernels, attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import ARCHITECTURES, Variant, hf_logits, random_tokens, tiny_checkpoint

NAMES = ("smollm3-window", "olmo2", "olmo3", "granite", "granite4", "phi4", "phi4-mini", "mistral-small")
NAMES += ("gemma2", "gemma3", "glm4", "gpt-oss", "mistral3-images", "gemma3-images")
VARIANTS = [variant for variant in ARCHITECTURES if variant.name in NAMES]
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32}
SETS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i / 2 for i in range(8)]}


@pytest.mark.gpu
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda variant: variant.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tokens_of_an_engine_on_a_gpu(variant: Variant, dtype: str, tmp_path: Path) -> None:
    assert_it_prefers_what_transformers_prefers(variant, tmp_path, "cuda", dtype)


@pytest.mark.parametrize("name", ["gpt-oss", "phi4-mini", "gemma3-images", "olmo3", "gemma2"])
def test_tokens_of_an_engine_on_a_cpu(name: str, tmp_path: Path) -> None:
    (variant,) = (variant for variant in VARIANTS if variant.name == name)
    assert_it_prefers_what_transformers_prefers(variant, tmp_path, "cpu", "float32")


def assert_it_prefers_what_transformers_prefers(variant: Variant, tmp_path: Path, device: str, dtype: str) -> None:
    """One request alone, and four in a batch, in chunks. A token may differ where the best two are about equal."""
    overrides = {**variant.overrides, **WIDE}
    if "short_factor" in overrides.get("rope_parameters", {}):
        overrides["rope_parameters"] = {**overrides["rope_parameters"], **SETS}
    path, hf = tiny_checkpoint(tmp_path, variant.architecture, **overrides)
    hf.set_attn_implementation("eager")  # SDPA leaves out Gemma 2's soft cap, in transformers 5.17 for one
    llm = LLM(path, device=device, dtype=dtype, num_pages=128, page_size=16, max_prefill_tokens=16)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [tokens.tolist() for tokens in random_tokens(23, 40, 5, 18)]
    outputs = [*llm.generate(prompts[:1], params), *llm.generate(prompts, params)]
    llm.close()
    for prompt, output in zip([prompts[0], *prompts], outputs, strict=True):
        logits = hf_logits(hf, [*prompt, *output.token_ids])[len(prompt) - 1 : -1]
        behind = logits.max(dim=-1).values - logits.gather(1, torch.tensor(output.token_ids)[:, None]).squeeze(1)
        slack = logits.std() * (0.01 if dtype == "float32" else 0.5)
        assert float(behind.max()) < float(slack), f"{variant.name}: {behind.tolist()}, allowed {float(slack)}"
