"""Runs our layer, sampling and decoder kernels once, for compute-sanitizer to watch. Needs a CUDA device.

``python -m tests.kernels.sanitize fp8`` runs one of `CASES`; without a name, all run.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from minisgl.batch import Batch
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.prefill_graph import PrefillGraphRunner
from minisgl.engine.verify_graph import VerifyGraphRunner
from minisgl.llm import LLM
from minisgl.models.fusions import FUSIONS
from minisgl.models.persistent_decoder import PersistentDecoder
from minisgl.models.single_token import SingleTokenDecoder
from minisgl.sampling_params import SamplingParams
from tests.drafting import KnowsTheAnswers, draft_always
from tests.kernels.test_persistent_decoder import ON_A_GPU
from tests.model_zoo import Variant

_ODD = Variant("qwen3", "Qwen3ForCausalLM", {"head_dim": 64})  # its widths fill no tile
_WIDER = Variant("qwen3", "Qwen3ForCausalLM", {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64})
CASES: dict[str, tuple[Variant, str, type[SingleTokenDecoder] | None]] = {
    "plain": (_ODD, "none", SingleTokenDecoder),
    "fp8": (_WIDER, "fp8", SingleTokenDecoder),
    "int4": (_WIDER, "int4", SingleTokenDecoder),
    "experts": (Variant("qwen3-moe", "Qwen3MoeForCausalLM", {"head_dim": 64}), "none", None),
    "persistent": (ON_A_GPU["qwen3"], "none", PersistentDecoder),
}
"""A model, how its weights are quantised, and what decodes a row that is alone; None is the model."""
_PROMPTS = [[1, 2, 3] * 30, [5], [7, 8] * 9]
_PARAMS = [
    SamplingParams(max_tokens=3, temperature=0.0),
    SamplingParams(max_tokens=4, seed=1),
    SamplingParams(max_tokens=20, seed=2, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
]
_DRAFTS = 3


def run(name: str, device: str = "cuda", dtype: str = "bfloat16") -> None:
    """Padded steps of prompts, of drafts, of several rows and of one; greedy and random, all stages of the sampler."""
    variant, quantization, decoder = CASES[name]
    with tempfile.TemporaryDirectory() as root:
        path, _ = variant.checkpoint(Path(root))
        llm = LLM(
            path,
            device=device,
            dtype=dtype,
            quantization=quantization,
            num_pages=64,
            page_size=4,
            prefill_attention="cascade",
            decode_attention="cascade",
            sampler="triton",
            fusions=FUSIONS,
            enforce_eager=True,
            drafter="tests.drafting:KnowsTheAnswers",
            num_draft_tokens=_DRAFTS,
        )
    eager, single = llm.engine.runner, None
    if decoder is not None:
        assert decoder.supports(eager.model), f"{name}: this device has no {decoder.__name__} for the model"
        single = decoder(eager.model, eager.kv_cache)
    # Not graphs but the same kernels one by one, which the sanitizer tells apart.
    prefill = PrefillGraphRunner(eager, (16, 128), CpuGraph)
    verify = VerifyGraphRunner(prefill, (1, 4), _DRAFTS + 1, CpuGraph)
    llm.engine.runner = decode = CudaGraphRunner(verify, (1, 4), CpuGraph, fused=True, single_row=single)
    sizes = [noted_sizes(runner) for runner in (prefill, verify, decode)]

    undrafted = [replace(params, num_draft_tokens=0) for params in _PARAMS]
    expected = [output.token_ids for output in llm.generate(_PROMPTS, undrafted)]
    KnowsTheAnswers.answers = [prompt + tokens for prompt, tokens in zip(_PROMPTS, expected, strict=True)]
    drafted = [output.token_ids for output in draft_always(llm).generate(_PROMPTS, _PARAMS)]
    for answers in (expected, drafted):
        assert [len(tokens) for tokens in answers] == [params.max_tokens for params in _PARAMS]
    assert [each - {None} for each in sizes] == [{16, 128}, {4, 16}, {1, 4}], "each padded step was run"


def noted_sizes(runner: PrefillGraphRunner | CudaGraphRunner) -> set[int | None]:
    """The padded sizes that a runner will have found for its steps; None where it found none."""
    sizes: set[int | None] = set()
    find = runner.size_for

    def note(batch: Batch) -> int | None:
        sizes.add(size := find(batch))
        return size

    runner.size_for = note
    return sizes


def main(names: list[str]) -> None:
    for name in names:
        run(name)
        print(f"{name}: all requests were answered")


if __name__ == "__main__":
    main(sys.argv[1:] or list(CASES))
