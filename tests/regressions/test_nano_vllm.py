"""What goes wrong in nano-vllm (commit bb823b3), and does not here."""

from __future__ import annotations

from pathlib import Path

import pytest

from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner, graph_sizes
from minisgl.errors import InvalidRequest
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from tests.tiny_text_model import assert_idle_and_clean, text_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_checkpoint(tmp_path_factory.mktemp("nano-vllm"))


def test_nano_vllm_a_prompt_larger_than_the_pool_aborts_everything(path: Path) -> None:
    """An assertion of the scheduler ends the process, and with it all other requests."""
    llm = LLM(path, page_size=4, num_pages=8)
    outputs = llm.generate([[1] * 9, [2] * 33, [3] * 9], GREEDY)
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "33 tokens" in (outputs[1].error or "")
    assert_idle_and_clean(llm)


def test_nano_vllm_a_sequence_that_outgrows_the_pool_aborts_everything(path: Path) -> None:
    """It preempts itself, is never admitted again, and the scheduler asserts that something was scheduled."""
    llm = LLM(path, page_size=4, num_pages=8)
    long = SamplingParams(temperature=0.0, max_tokens=100, ignore_eos=True)
    outputs = llm.generate([[1] * 9, [2] * 9, [3] * 9], [GREEDY, long, GREEDY])
    assert [output.finish_reason for output in outputs] == ["length", "error", "length"]
    assert "outgrew the KV cache (8 pages of 4 tokens)" in (outputs[1].error or "")
    assert len(outputs[1].token_ids) == 32 - 9 + 1, "as far as the pool went"
    assert_idle_and_clean(llm)


def test_nano_vllm_max_tokens_0_never_ends(path: Path) -> None:
    """The number of tokens is compared for equality after the first was generated."""
    with pytest.raises(InvalidRequest, match="max_tokens: must be an integer"):
        SamplingParams(max_tokens=0)
    one = LLM(path, page_size=4, num_pages=8).generate([[1, 2]], SamplingParams(max_tokens=1, ignore_eos=True))[0]
    assert (len(one.token_ids), one.finish_reason) == (1, "length")


@pytest.mark.parametrize("sizes", [(1, 2, 4, 8, 16), graph_sizes(20)])
def test_nano_vllm_a_batch_of_18_has_no_graph_if_20_may_run(path: Path, sizes: tuple[int, ...]) -> None:
    """Graphs are captured for 1, 2, 4, 8, 16 and no more. Here every number of rows runs, and gives the same tokens,
    with those graphs as with our own. (On the CPU a graph is replayed by running its work again.)"""
    llm = LLM(
        path,
        device="cpu",
        page_size=4,
        num_pages=256,
        max_running_requests=20,
        dtype="float64",
        prefix_cache="none",
        prefill_attention="torch",
        decode_attention="torch",
        enforce_eager=True,
    )
    prompts = [[i + 1] * 5 for i in range(20)]
    expected = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    llm.engine.runner = CudaGraphRunner(llm.engine.runner, sizes, CpuGraph)
    for rows in range(1, 21):
        assert [o.token_ids for o in llm.generate(prompts[:rows], GREEDY)] == expected[:rows]


def test_nano_vllm_an_empty_prompt_raises_in_the_scheduler(path: Path) -> None:
    llm = LLM(path, page_size=4, num_pages=8)
    with pytest.raises(InvalidRequest, match="prompt: must have at least one token"):
        llm.generate([[1, 2], []], GREEDY)
    assert_idle_and_clean(llm)
    assert llm.generate([[1, 2]], GREEDY)[0].finish_reason == "length"


def test_nano_vllm_two_engines_claim_the_same_port(path: Path) -> None:
    """Its port and the name of its shared memory are constants, so a machine can hold one engine."""
    first, second = LLM(path, page_size=4, num_pages=16), LLM(path, page_size=2, num_pages=32)
    streams = [first.stream([1, 2], GREEDY), second.stream([1, 2], GREEDY)]
    tokens = [[t for d in pair for t in d.token_ids] for pair in zip(*streams, strict=False)]
    assert len(tokens) >= 8
    assert all(a == b for a, b in tokens[:8])
    for stream in streams:
        assert list(stream) == []
    del first
    assert len(second.generate([[1, 2]], GREEDY)[0].token_ids) == 8


def test_nano_vllm_there_is_no_greedy_sampling(path: Path) -> None:
    """A temperature of 0 is refused. Here it takes the likeliest token, every time."""
    llm = LLM(path, page_size=4, num_pages=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=1, ignore_eos=True)
    outputs = llm.generate([[1, 2, 3]] * 5, params)
    assert len({tuple(output.token_ids) for output in outputs}) == 1
    assert [entry.top[0][0] for entry in outputs[0].logprobs or []] == outputs[0].token_ids
