"""Ranks on GPUs give the tokens of one GPU, and leave nothing on any. Run with ``pytest -m gpu`` on two or four."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minisgl.distributed.peer_all_reduce import ONE_SHOT_BYTES
from minisgl.distributed.remote_executor import RemoteExecutor
from minisgl.errors import EngineDead
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.distributed.generating import PARAMS, PROMPTS, step_for_ever, tokens, wait_for
from tests.model_zoo import tiny_checkpoint
from tests.test_gpu import agreeing_until_a_tie

RANKS = [pytest.param(size, marks=pytest.mark.needs(f"{size} GPUs")) for size in (2, 4)]
TWO = pytest.mark.needs("2 GPUs")
pytestmark = pytest.mark.gpu

SIZES = {"head_dim": 32, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 128}
"""Heads wide enough for the decoder of single tokens, and rows that are aligned."""
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "graphs, overlap": ("Qwen3ForCausalLM", {}, {}),
    "graphs, NCCL alone": ("LlamaForCausalLM", {}, {"all_reduce": "torch"}),
    "eager, no overlap": (
        "Qwen3ForCausalLM",
        {"num_key_value_heads": 2},
        {"enforce_eager": True, "overlap": False, "control_plane": "zmq"},
    ),
    "plain layers, chunks": (
        "Qwen2ForCausalLM",
        {"tie_word_embeddings": True},
        {"fusions": (), "sampler": "default", "control_plane": "zmq", "max_prefill_tokens": 16},
    ),
    "experts, scarce memory": ("Qwen3MoeForCausalLM", {"num_key_value_heads": 1}, {"num_pages": 14}),
}


@pytest.fixture(autouse=True)
def room_on_the_first_gpu() -> None:
    """Ranks compare what is free; what earlier tests have left in PyTorch's cache must not be in their way."""
    gc.collect()
    torch.cuda.empty_cache()


def engine(path: Path, **options: Any) -> LLM:
    common = {"device": "cuda", "dtype": "float32", "page_size": 4, "num_pages": 256, "seed": 1}
    return LLM(path, **{**common, **options})


def answers(path: Path, **options: Any) -> list[list[int]]:
    """To all prompts at once, once more from the prefix cache, and to one prompt alone."""
    with engine(path, **options) as llm:
        return [
            *tokens(llm.generate(PROMPTS, PARAMS)),
            *tokens(llm.generate(PROMPTS, PARAMS)),
            *tokens(llm.generate(PROMPTS[:1], PARAMS[:1])),
        ]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize(("architecture", "sizes", "options"), CASES.values(), ids=CASES)
def test_tokens_are_those_of_one_gpu(
    tmp_path: Path, architecture: str, sizes: dict[str, Any], options: dict[str, Any], ranks: int
) -> None:
    path, _ = tiny_checkpoint(tmp_path, architecture, **{**SIZES, **sizes})
    expected = answers(path, **{**options, "all_reduce": "auto"})
    assert answers(path, tensor_parallel_size=ranks, verify_ranks=True, **options) == expected


@TWO
def test_an_engine_on_the_second_gpu_gives_the_tokens_of_one_on_the_first(tmp_path: Path) -> None:
    """Whatever the process's current GPU is."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **SIZES)
    expected = answers(path)
    before = free_memory()
    assert answers(path, device="cuda:1") == expected
    assert torch.cuda.current_device() == 0
    assert free_memory()[0] > before[0] - (64 << 20)


@pytest.mark.parametrize("ranks", RANKS)
def test_bfloat16_departs_from_one_gpu_at_ties_only(tmp_path: Path, ranks: int) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **{**SIZES, "head_dim": 64, "num_hidden_layers": 1})
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    rng = np.random.default_rng(3)
    shared = rng.integers(0, 200, 300).tolist()
    prompts = [shared + rng.integers(0, 200, 1 + i).tolist() for i in range(12)] + [[5], [1, 2, 3]]
    options = {"dtype": "bfloat16", "page_size": 16, "num_pages": 512}
    expected = engine(path, **options).generate(prompts, params)
    with engine(path, tensor_parallel_size=ranks, verify_ranks=True, **options) as llm:
        assert agreeing_until_a_tie(llm.generate(prompts, params), expected) > 100


@pytest.mark.parametrize("ranks", RANKS)
def test_sums_that_norms_take_upon_themselves_give_the_same_tokens(tmp_path: Path, ranks: int) -> None:
    """Prefill steps whose sums are too large for one shot; the decode steps after them are not."""
    sizes = {**SIZES, "hidden_size": 1024, "head_dim": 128, "max_position_embeddings": 2048}
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **sizes)
    rng = np.random.default_rng(5)
    prompts = [rng.integers(0, 200, 700 + 50 * i).tolist() for i in range(4)]
    assert min(map(len, prompts)) * 4 * sizes["hidden_size"] > ONE_SHOT_BYTES[ranks]
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
    options = {"num_pages": 1024, "max_prefill_tokens": 1024}
    expected = engine(path, **options).generate(prompts, params)
    with engine(path, tensor_parallel_size=ranks, verify_ranks=True, **options) as llm:
        assert agreeing_until_a_tie(llm.generate(prompts, params), expected, tie=0.01) > 50


@TWO
def test_dummy_weights_and_pages_are_those_of_one_model(tmp_path: Path) -> None:
    """The pool is sized from memory: two ranks have half of a page each, and so about twice the pages."""
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM", **SIZES)
    options = {"load_format": "dummy", "num_pages": None, "memory_ratio": 0.2}
    alone = engine(path, **options)
    expected, pages = tokens(alone.generate(PROMPTS, PARAMS)), alone.executor.num_pages
    del alone
    gc.collect()
    torch.cuda.empty_cache()
    with engine(path, tensor_parallel_size=2, **options) as llm:
        assert tokens(llm.generate(PROMPTS, PARAMS)) == expected
        assert 1.8 * pages < llm.executor.num_pages < 2.2 * pages


def free_memory() -> list[int]:
    return [torch.cuda.mem_get_info(device)[0] for device in range(torch.cuda.device_count())]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("standing_still", [False, True])
def test_a_killed_rank_leaves_no_memory_in_use(tmp_path: Path, ranks: int, standing_still: bool) -> None:
    """In decode; and in a collective, in which the others wait on their GPUs."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **SIZES)
    before = free_memory()  # with a context on every device
    llm = engine(path, tensor_parallel_size=ranks, num_pages=4096)
    assert isinstance(llm.executor, RemoteExecutor)
    victim = llm.executor.processes.children[-1]
    for prompt in PROMPTS:
        for generation in llm.prepare(prompt, SamplingParams(max_tokens=200, ignore_eos=True)):
            llm.submit(generation)
    for _ in range(5):
        llm.step()
    if standing_still:
        os.kill(victim.pid, signal.SIGSTOP)
        threading.Timer(1.0, victim.kill).start()  # by then the others wait for it
    else:
        victim.kill()
    start = time.monotonic()
    with pytest.raises(EngineDead, match=f"rank {ranks - 1} was killed by SIGKILL"):
        step_for_ever(llm)
    assert time.monotonic() - start < 10.0
    assert wait_for(lambda: all(now > then - (64 << 20) for now, then in zip(free_memory(), before, strict=True)), 10.0)


@TWO
@pytest.mark.parametrize("all_reduce", ["auto", "torch"])
def test_a_rank_that_stands_still_ends_the_engine(tmp_path: Path, all_reduce: str) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", **SIZES)
    llm = engine(path, tensor_parallel_size=2, distributed_timeout=20.0, all_reduce=all_reduce)
    assert tokens(llm.generate(PROMPTS, PARAMS))
    assert isinstance(llm.executor, RemoteExecutor)
    ranks = llm.executor.processes.children
    os.kill(ranks[1].pid, signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(EngineDead, match=r"rank 1 (does not answer|has not answered for 30 s); it is stopped or hangs"):
        llm.generate(PROMPTS, PARAMS)
    assert time.monotonic() - start < 60.0
    assert wait_for(lambda: all(rank.exited.done() for rank in ranks), 10.0)
