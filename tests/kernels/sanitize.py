"""Runs our layer, sampling and decoder kernels once, for compute-sanitizer to watch. Needs a CUDA device."""

from __future__ import annotations

import tempfile
from pathlib import Path

from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.llm import LLM
from minisgl.models.single_token import SingleTokenDecoder
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint


def main() -> None:
    """Steps of one row and of several, prompts, greedy and random rows, all stages of the sampler, experts."""
    params = [
        SamplingParams(max_tokens=3, temperature=0.0),
        SamplingParams(max_tokens=4, seed=1),
        SamplingParams(max_tokens=9, seed=2, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1),
    ]
    for architecture in ("Qwen3ForCausalLM", "Qwen3MoeForCausalLM"):
        with tempfile.TemporaryDirectory() as root:
            path, _ = tiny_checkpoint(Path(root), architecture, head_dim=64)
            llm = LLM(path, device="cuda", dtype="bfloat16", num_pages=64, page_size=4, enforce_eager=True)
        runner, single = llm.engine.runner, None
        if SingleTokenDecoder.supports(runner.model):
            single = SingleTokenDecoder(runner.model, runner.kv_cache)
        # Not graphs but the same kernels one by one, which the sanitizer tells apart.
        llm.engine.runner = CudaGraphRunner(runner, (1, 4), CpuGraph, fused=True, single_row=single)
        outputs = llm.generate([[1, 2, 3] * 30, [5], [7, 8] * 9], params)
        assert [len(output.token_ids) for output in outputs] == [3, 4, 9]
    print("all requests were answered")


if __name__ == "__main__":
    main()
