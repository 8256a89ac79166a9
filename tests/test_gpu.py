"""The same engine on a CUDA device: the same tokens, and nothing left behind. Run with ``pytest -m gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minisgl.attention.select import ATTENTION_BACKENDS
from minisgl.batch import Batch
from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.engine.engine import LaunchedStep
from minisgl.engine.model_runner import ModelRunner
from minisgl.llm import LLM
from minisgl.models.config import ModelConfig
from minisgl.models.fusions import fuse_layers
from minisgl.models.loader import load_model
from minisgl.outputs import RequestOutput
from minisgl.registry import resolve
from minisgl.sampling_params import SamplingParams
from tests.drafting import draft_always, drafts_of
from tests.model_zoo import hf_logits, random_tokens, tiny_checkpoint
from tests.paged_runner import PagedRunner
from tests.test_metamorphic import Oracle, assert_answers, make_oracle, run

pytestmark = pytest.mark.gpu


BACKENDS = ["torch", "triton", "cascade", "triton+torch", "torch+cascade"]
"""One for both phases, or that of prefill and that of decode."""
PLAIN: dict[str, Any] = {
    "prefill_attention": "torch",
    "decode_attention": "torch",
    "enforce_eager": True,
    "fusions": (),
    "sampler": "default",
}
OPTIONS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager": {"enforce_eager": True},
    "graphs of three sizes": {"graph_batches": (1, 5, 40)},
    "graphs without fused kernels": {"fusions": (), "sampler": "default"},
}
STEPS = [
    ("prefill-first", True, "scarce"),
    ("prefill-first", False, "scarce"),
    ("mixed", True, "scarce"),
    ("mixed", False, "scarce"),
    ("prefill-first", False, "ample"),
    ("mixed", True, "ample"),
]
"""Batch policy, overlap and memory; where it is scarce, so that rows are preempted, all policies meet all overlaps."""


@pytest.fixture(scope="module", params=["LlamaForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return make_oracle(tmp_path_factory.mktemp(request.param), request.param)


@pytest.mark.parametrize("cache", ["radix", "block-hash", "none"])
@pytest.mark.parametrize("composition", ["prefill-first", "mixed"])
@pytest.mark.parametrize("memory", ["ample", "scarce"])
def test_cuda_gives_the_tokens_of_transformers(oracle: Oracle, cache: str, composition: str, memory: str) -> None:
    outputs = run(oracle, cache, 16, composition, memory, 64, device="cuda")
    assert_answers(oracle, outputs, cache, memory, few_steps=gives_pages_back(oracle))


def gives_pages_back(oracle: Oracle) -> bool:
    """Whether a page of 16 tokens is longer than the window, so that a row gives one back for each that it takes."""
    return (ModelConfig.from_dir(oracle.path).longest_window or 16) < 16


def attention(backend: str) -> dict[str, str]:
    """The options that choose a backend of `BACKENDS`."""
    prefill, _, decode = backend.partition("+")
    return {"prefill_attention": prefill, "decode_attention": decode or prefill}


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "MistralForCausalLM", "Qwen3MoeForCausalLM"])
def wide_oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    """Heads are wide enough for the single-token decoder."""
    return make_oracle(tmp_path_factory.mktemp(request.param), request.param, head_dim=32)


@pytest.mark.parametrize(("composition", "overlap", "memory"), STEPS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backends_graphs_and_overlap_give_the_tokens_of_transformers(
    wide_oracle: Oracle, backend: str, options: dict[str, Any], composition: str, overlap: bool, memory: str
) -> None:
    settings = {
        "device": "cuda",
        "dtype": "float32",
        **attention(backend),
        **options,
    }
    outputs = run(wide_oracle, "radix", 16, composition, memory, 64, overlap, **settings)
    assert_answers(wide_oracle, outputs, "radix", memory, few_steps=gives_pages_back(wide_oracle))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("backend", ["torch", "triton", "cascade"])
def test_logits_of_fused_layers_are_those_of_transformers(tmp_path: Path, architecture: str, backend: str) -> None:
    """A prompt in chunks, then decode steps, all on the device in float32."""
    path, reference = tiny_checkpoint(tmp_path, architecture, head_dim=32)
    config = ModelConfig.from_dir(path)
    model = load_model(path, config, torch.float32, torch.device("cuda"))
    fuse_layers(model, ("norm", "rope", "activation"))
    runner = PagedRunner.of(model, config, torch.float32, rows=1, max_len=96, page_size=16)
    runner.backend = resolve("attention", backend, ATTENTION_BACKENDS)(runner.cache)
    (tokens,) = random_tokens(90)
    expected = hf_logits(reference, tokens)
    chunks = [tokens[:50], tokens[50:83], *np.split(tokens[83:], 7)]
    logits = torch.cat([runner.step({0: chunk})[0] for chunk in chunks])
    torch.testing.assert_close(logits.cpu(), expected, rtol=1e-3, atol=1e-3)


HALF_BACKENDS = ["triton", "cascade", *(["flashinfer", "flashinfer+triton"] if find_spec("flashinfer") else [])]


@pytest.mark.parametrize("eager", [True, False])
@pytest.mark.parametrize("backend", HALF_BACKENDS)
def test_bfloat16_departs_from_the_reference_at_ties_only(tmp_path: Path, backend: str, eager: bool) -> None:
    """Two engines that round differently may choose differently where the best two tokens are about equal."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=64, num_hidden_layers=1)
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_pages": 512, "seed": 1}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 200, 300).tolist()
    prompts = [shared + rng.integers(0, 200, 1 + i).tolist() for i in range(12)] + [[5], [1, 2, 3]]
    expected = LLM(path, **common, **PLAIN).generate(prompts, params)
    outputs = LLM(path, **common, **attention(backend), enforce_eager=eager).generate(prompts, params)
    assert agreeing_until_a_tie(outputs, expected) > 100


def test_drafts_in_bfloat16_depart_from_the_reference_at_ties_only(tmp_path: Path) -> None:
    """A step that verifies rounds differently from a decode step."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=64, num_hidden_layers=1)
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_pages": 512, "seed": 1}
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)
    prompts = [[7, 8, 9, 10 + i] * (3 + i) for i in range(12)]  # so that there is something to look up
    expected = LLM(path, **common, **PLAIN).generate(prompts, params)
    drafting = draft_always(LLM(path, **common, drafter="ngram"))
    assert agreeing_until_a_tie(drafting.generate(prompts, params), expected) > 100
    drafted, accepted = drafts_of(drafting)
    assert 0 < accepted < drafted


@pytest.mark.parametrize("overlap", [True, False])
def test_a_request_alone_is_decoded_by_the_kernel_that_stays(tmp_path: Path, overlap: bool) -> None:
    """With and without a cached prefix, and one that goes on while another has ended. Rounded to bfloat16, logits as
    large as these differ by up to a quarter from one to the next."""
    shape = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 64, "num_key_value_heads": 4}
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **shape, num_attention_heads=8, num_hidden_layers=1)
    common: dict[str, Any] = {"device": "cuda", "dtype": "bfloat16", "num_pages": 512, "seed": 1}
    plain, fast = LLM(path, **common, **PLAIN), LLM(path, **common, overlap=overlap)
    runner = fast.engine.runner
    assert isinstance(runner, CudaGraphRunner)
    assert [type(runner.model_for(rows)).__name__ for rows in (1, 2)] == ["PersistentDecoder", "Qwen3"]
    greedy = [SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=2) for tokens in (8, 40)]
    shared = np.random.default_rng(3).integers(0, 200, 300).tolist()
    for prompts in ([shared], [[*shared, 7, 8]], [[5]], [[1, 2, 3], shared]):
        params = greedy[-len(prompts) :]
        expected, outputs = plain.generate(prompts, params), fast.generate(prompts, params)
        assert agreeing_until_a_tie(outputs, expected, tie=0.5) >= 8


def agreeing_until_a_tie(outputs: Sequence[RequestOutput], expected: Sequence[RequestOutput], tie: float = 0.1) -> int:
    """Tokens that agree. An output may depart from its reference where the best two were about equal there."""
    agreeing = 0
    for output, reference in zip(outputs, expected, strict=True):
        assert reference.logprobs is not None
        for token, wanted, logprobs in zip(output.token_ids, reference.token_ids, reference.logprobs, strict=True):
            if token != wanted:
                (_, best), (_, second) = logprobs.top
                assert best - second < tie, "not a tie"
                break
            agreeing += 1
    return agreeing


@pytest.mark.parametrize(("dtype", "tie"), [("float32", 0.01), ("bfloat16", 0.5)])
@pytest.mark.parametrize("backend", ["torch", "triton", "cascade"])
def test_keys_and_values_of_eight_bits_give_the_tokens_of_the_reference(
    tmp_path: Path, backend: str, dtype: str, tie: float
) -> None:
    """Graphs, fused kernels and the single-token decoder against plain PyTorch, over the same rounded memory. Before
    rounding, keys of bfloat16 differ in their last bit: some are rounded to the next number of eight bits."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=64, num_hidden_layers=1)
    common: dict[str, Any] = {"device": "cuda", "dtype": dtype, "kv_dtype": "fp8", "num_pages": 512, "seed": 1}
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 200, 300).tolist()
    prompts = [shared + rng.integers(0, 200, 1 + i).tolist() for i in range(12)] + [[5], [1, 2, 3]]
    plain, fast = LLM(path, **common, **PLAIN), LLM(path, **common, prefill_attention=backend, decode_attention=backend)
    assert fast.engine.kv_cache.k.dtype == torch.float8_e4m3fn
    assert isinstance(fast.engine.runner, CudaGraphRunner) == (backend != "torch")
    expected, outputs = plain.generate(prompts, params), fast.generate(prompts, params)
    expected += plain.generate([shared], params)
    outputs += fast.generate([shared], params)
    assert agreeing_until_a_tie(outputs, expected, tie) > 100


def test_graphs_hold_a_mixture_of_experts(tmp_path: Path) -> None:
    """Its experts as grouped products, against an engine whose plain experts keep it out of graphs."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM", head_dim=32)
    common: dict[str, Any] = {
        "device": "cuda",
        "dtype": "float32",
        "num_pages": 256,
        "prefill_attention": "triton",
        "decode_attention": "triton",
    }
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    prompts = [[5], *(list(range(i, 3 * i)) for i in range(1, 14))]
    fused, plain = LLM(path, **common), LLM(path, **common, fusions=())
    assert type(fused.engine.runner) is CudaGraphRunner
    assert type(plain.engine.runner) is ModelRunner
    ours, expected = ([output.token_ids for output in llm.generate(prompts, params)] for llm in (fused, plain))
    assert ours == expected


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_a_steps_work_on_the_host_never_waits_for_the_device(tmp_path: Path, architecture: str) -> None:
    """With overlap, the one thing that is waited for is the event of the step before."""
    path, _ = tiny_checkpoint(tmp_path, architecture, head_dim=32)
    llm = LLM(path, device="cuda", num_pages=256)
    sampled = SamplingParams(max_tokens=30, ignore_eos=True, seed=3)
    greedy = SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0)
    llm.generate([[1, 2, 3], list(range(50))], [sampled, greedy])
    launch = llm.engine.launch
    launched = []

    def watched(batch: Batch) -> LaunchedStep:
        launched.append(batch.num_rows)
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with patch.object(llm.engine, "launch", watched):
        outputs = llm.generate([[4, 5, 6], list(range(60))], [sampled, greedy])
    assert [output.finish_reason for output in outputs] == ["length", "length"]
    assert len(launched) > 25


def test_graph_memory_is_part_of_the_budget(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    free_before, _ = torch.cuda.mem_get_info()
    llm = LLM(path, device="cuda", memory_ratio=0.5)
    engine = llm.engine
    assert engine.graph_bytes > 0
    used = engine.num_pages * engine.page_bytes + engine.model_bytes + engine.graph_bytes
    assert abs(used - 0.5 * free_before) < 0.02 * free_before
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 0.53 * free_before


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


@pytest.mark.parametrize(("formula", "ratio"), [("free", 0.9), ("free", 0.995), ("peak", 0.9)])
def test_the_worst_steps_stay_within_what_the_formula_promised(tmp_path: Path, formula: str, ratio: float) -> None:
    """256 rows at once, a wide vocabulary, and the costliest sampling. Formula A promises that all that was free
    suffices, even where its ratio leaves less than a step needs; formula B that its share of the card does."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", vocab_size=150_000)
    llm = LLM(path, device="cuda", memory_formula=formula, memory_ratio=ratio)
    params = SamplingParams(
        max_tokens=4,
        ignore_eos=True,
        temperature=1.0,
        top_p=0.9,
        repetition_penalty=1.1,
        frequency_penalty=0.1,
        logprobs=20,
    )
    torch.cuda.reset_peak_memory_stats()
    outputs = llm.generate([[i % 200] * 100 for i in range(300)], params)
    assert [output.finish_reason for output in outputs] == ["length"] * 300
    free, total = torch.cuda.mem_get_info()
    peak = total - free - torch.cuda.memory_reserved() + torch.cuda.max_memory_reserved()  # of all processes
    promised = ratio * total if formula == "peak" else total
    assert peak <= promised
    pages = llm.engine.num_pages * llm.engine.page_bytes
    print(f"{formula} {ratio}: pages {pages / 1e9:.2f} GB, peak {peak / 1e9:.2f}, promised {promised / 1e9:.2f} GB")
    assert peak > 0.8 * promised, "a promise that is easy to keep"
