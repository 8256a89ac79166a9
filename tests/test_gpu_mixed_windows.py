"""Layers of both kinds on a CUDA device: every backend reads two page tables, in graphs and out of them.

Run with ``pytest -m gpu``. The reference is plain PyTorch without window pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.llm import LLM
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.memory import KVMemory
from minisgl.scheduler.mixed_memory import MixedMemory
from tests.model_zoo import random_tokens, tiny_checkpoint
from tests.test_gpu import PLAIN, agreeing_until_a_tie

pytestmark = pytest.mark.gpu

WINDOW = 64
PARAMS = SamplingParams(temperature=0.0, max_tokens=150, ignore_eos=True, logprobs=2)
PROMPTS = [tokens.tolist() for tokens in random_tokens(5, 70, 200, 700, 33)]
PROMPTS += [PROMPTS[3][:400] + PROMPTS[0], PROMPTS[3]]  # with prefixes to share, and more than a window long
TIES = {"float32": 0.01, "bfloat16": 0.5}
APART = {"float32": 0.001, "bfloat16": 0.5}
"""How far the log-probabilities of tokens that agree may lie apart."""
SHAPES = {
    # Plain layers of Mistral's kind, which all fused kernels know, the single-token decoder too.
    "plain": ("Qwen3ForCausalLM", {"use_sliding_window": True, "max_window_layers": 0}),
    # Sandwich norms, and a rope for each kind of layer. FlashInfer wants no scale smaller than it can hold.
    "gemma3": ("Gemma3ForCausalLM", {"query_pre_attn_scalar": 64}),
}
FLASHINFER = [("flashinfer", "bfloat16")] if find_spec("flashinfer") else []
BACKENDS = [
    *((backend, dtype) for backend in ("torch", "triton", "cascade") for dtype in ("float32", "bfloat16")),
    *FLASHINFER,  # has no kernels for float32
]


def mixed_checkpoint(directory: Path, shape: str, head_dim: int, pairs: int = 2) -> Path:
    """With ``pairs`` of a layer with a window and one without."""
    architecture, options = SHAPES[shape]
    layers = ["sliding_attention", "full_attention"] * pairs
    sizes = {"num_hidden_layers": len(layers), "layer_types": layers, "sliding_window": WINDOW}
    return tiny_checkpoint(
        directory, architecture, head_dim=head_dim, max_position_embeddings=2048, **sizes, **options
    )[0]


def make(path: Path, dtype: str, **options: Any) -> LLM:
    """Of 3,200 positions; window pages for 576, fewer than a long prompt has."""
    sizes = {"page_size": 16, "num_pages": 200, "max_prefill_tokens": 256, "max_running_requests": 4}
    return LLM(path, **{**sizes, "device": "cuda", "dtype": dtype, "seed": 1, **options})


def answers(llm: LLM) -> list[RequestOutput]:
    """Twice, the second time with what the first left in the cache."""
    return llm.generate(PROMPTS, PARAMS) + llm.generate(PROMPTS, PARAMS)


def furthest_apart(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> float:
    """The largest difference of log-probabilities, of the tokens before each answer's first other token."""
    differences = [0.0]
    for output, reference in zip(outputs, expected, strict=True):
        for ours, theirs in zip(output.logprobs or (), reference.logprobs or (), strict=True):
            if ours.token_id != theirs.token_id:
                break
            differences.append(abs(ours.logprob - theirs.logprob))
    return max(differences)


@pytest.mark.parametrize("options", [{}, {"enforce_eager": True}, {"overlap": False}], ids=["graphs", "eager", "late"])
@pytest.mark.parametrize(("backend", "dtype"), BACKENDS)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("shape", SHAPES)
def test_two_page_tables_give_the_tokens_of_one(
    tmp_path: Path, shape: str, head_dim: int, backend: str, dtype: str, options: dict[str, Any]
) -> None:
    # Four layers of Gemma's round so much in bfloat16 that most answers meet a tie within ten tokens.
    path = mixed_checkpoint(tmp_path, shape, head_dim, pairs=1 if (shape, dtype) == ("gemma3", "bfloat16") else 2)
    plain = make(path, dtype, num_pages=512, page_store="host", page_store_gib=0.01, **PLAIN)
    assert type(plain.scheduler.memory) is KVMemory
    expected = answers(plain)
    plain.close()

    llm = make(path, dtype, prefill_attention=backend, decode_attention=backend, **options)
    memory, runner = llm.scheduler.memory, llm.engine.runner
    assert isinstance(memory, MixedMemory)
    assert isinstance(runner, CudaGraphRunner) == (backend != "torch" and "enforce_eager" not in options)
    assert llm.engine.num_window_pages == 36
    outputs = answers(llm)
    assert agreeing_until_a_tie(outputs, expected, TIES[dtype]) > (1500 if dtype == "float32" else 300)
    assert furthest_apart(outputs, expected) < APART[dtype]
    llm.scheduler.check()
    assert memory.available == 200
    assert memory.windows.available == 36


@pytest.mark.parametrize("backend", ["triton", *(backend for backend, _ in FLASHINFER)])
def test_nothing_of_free_and_dummy_pages_is_seen(tmp_path: Path, backend: str) -> None:
    """With large numbers in all free window pages, which a tile may load, and hide by its mask."""
    path = mixed_checkpoint(tmp_path, "plain", 64)
    llm = make(path, "bfloat16", prefill_attention=backend, decode_attention=backend)
    expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    llm.scheduler.memory.flush()
    memory, cache = llm.scheduler.memory, llm.engine.kv_cache
    assert isinstance(memory, MixedMemory)
    requests = [llm.core.input_processor.process(prompt, PARAMS)[0] for prompt in PROMPTS]
    for request in requests:
        llm.core.add(request)
    while llm.core.has_work:
        free = torch.from_numpy(memory.windows.pool.is_free).nonzero().flatten().to("cuda")
        for kv in (cache.window_k, cache.window_v):
            kv[:, free] = 1e4
        llm.core.step()
    assert [request.output for request in requests] == expected
