"""Prefill and mixed steps of every size have a graph to go to, and what is behind their end disturbs nobody."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from minisgl.attention.torch_backend import PagedAttention
from minisgl.attention.triton.backend import TritonAttention
from minisgl.attention.triton.decode import paged_decode_attention
from minisgl.attention.triton.prefill import QueryTiles, paged_prefill_attention
from minisgl.batch import Batch, DeviceBatch, batch_arrays
from minisgl.config import EngineConfig
from minisgl.context import AttentionSpec
from minisgl.engine import prefill_graph
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner
from minisgl.engine.device_state import DeviceState
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.prefill_graph import (
    PrefillGraphRunner,
    StepBuffers,
    build_prefill_runner,
    measure_prefill_memory,
    token_sizes,
    tokens_to_capture,
)
from minisgl.errors import ConfigError
from minisgl.kvcache.pool import KVCache
from minisgl.llm import LLM
from minisgl.sampling_params import SamplingParams
from minisgl.scheduler.policy import BATCH_POLICIES
from tests.kernels.closeness import DEVICE
from tests.model_zoo import tiny_checkpoint
from tests.steps import step_of

PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 4 + [1, 2], [9], list(range(20, 46)), [3] * 7]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.8, seed=4, max_tokens=4),
    SamplingParams(temperature=0.0, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0.9, top_p=0.8, seed=5, max_tokens=2),
    SamplingParams(temperature=0.0, max_tokens=5, repetition_penalty=1.2),
]


@pytest.mark.parametrize("largest", [1, 63, 64, 65, 100, 256, 300, 1000, 2048, 8192])
def test_every_number_of_tokens_has_a_size_that_is_not_much_larger(largest: int) -> None:
    sizes = token_sizes(largest)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == largest
    for tokens in range(1, largest + 1):
        padded = min(size for size in sizes if size >= tokens)
        assert padded <= max(256, 1.25 * tokens)


def buffers(tokens: int = 24) -> StepBuffers:
    state = DeviceState(max_running=6, max_seq_len=40, page_size=4, dummy_page=9, device=torch.device("cpu"))
    return StepBuffers(state, page_size=4, tokens=tokens)


def test_a_step_is_padded_with_tokens_of_no_row_and_rows_without_tokens() -> None:
    batch, _ = step_of([1, 5, 3], [7, 0, 2])
    step = buffers()
    step.load(torch.from_numpy(step.pack(batch)))
    inputs, arrays = step.inputs, batch_arrays(batch)
    assert inputs.padded
    for name in ("slots", "seq_lens", "positions", "out_locs", "logit_rows"):
        values = arrays[name]
        assert np.array_equal(getattr(inputs, name)[: len(values)].numpy(), values)
    assert inputs.cu_seqlens_q.tolist() == [0, 1, 6, 9, 9, 9, 9, 9]
    assert inputs.seq_lens.tolist() == [8, 5, 5, 0, 0, 0, 0]
    assert set(inputs.slots[3:].tolist()) == {6}
    assert set(inputs.out_locs[9:].tolist()) == {9 * 4}  # the dummy page
    assert len(inputs.input_ids) == 24


def test_a_step_finds_its_tokens_in_the_token_table() -> None:
    batch, _ = step_of([1, 3], [2, 0])
    step = buffers()
    step.state.tokens.copy_(torch.arange(7 * 40).view(7, 40))
    step.load(torch.from_numpy(step.pack(batch)))
    step.look_up_tokens()
    assert step.inputs.input_ids[:4].tolist() == [
        40 * slot + position
        for slot, position in zip(batch.token_slots.tolist(), batch.positions.tolist(), strict=True)
    ]


PAGE_SIZE, TOKENS, ROWS = 4, 24, 30
STEPS = [
    ([24], [0]),  # many tiles of one row; what they leave behind would be beyond the ends of later rows
    ([1, 1, 5, 3], [7, 2, 0, 2]),
    ([1] * 24, [0] * 24),  # more tiles than there is room for
    ([2], [30]),
    ([1, 7], [12, 0]),
]


def test_attention_over_padded_inputs_is_that_over_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Step after step in the same memory: rows and tiles behind a step's end are empty, whatever was there before."""
    num_pages = ROWS * 10
    state = DeviceState(ROWS, 40, PAGE_SIZE, dummy_page=num_pages, device=DEVICE)
    step = StepBuffers(state, PAGE_SIZE, TOKENS)
    cache = KVCache(1, 2, 32, num_pages, PAGE_SIZE, torch.float32, DEVICE)
    cache.k.normal_()
    cache.v.normal_()
    padded, plain = TritonAttention(cache), TritonAttention(cache)
    spec = AttentionSpec(0, 4, 2, 32, 0.2)
    launched: list[QueryTiles] = []
    lengths: list[list[int]] = []

    def noted_prefill(*args: Any) -> None:
        launched.append(args[-1])
        paged_prefill_attention(*args)

    def noted_decode(q: Any, out: Any, k: Any, v: Any, inputs: DeviceBatch, *args: Any) -> None:
        lengths.append(inputs.seq_lens.tolist())
        paged_decode_attention(q, out, k, v, inputs, *args)

    monkeypatch.setattr("minisgl.attention.triton.backend.paged_prefill_attention", noted_prefill)
    monkeypatch.setattr("minisgl.attention.triton.backend.paged_decode_attention", noted_decode)
    keys = []
    for q_lens, kv_lens in STEPS:
        batch, inputs = step_of(q_lens, kv_lens, PAGE_SIZE)
        rows, width = inputs.page_table.shape
        state.page_table[:rows, :width] = inputs.page_table
        step.load(torch.from_numpy(step.pack(batch)))
        q = torch.randn(TOKENS, 4, 32, device=DEVICE)
        plain.plan(batch, replace(inputs, page_table=state.page_table))
        expected = plain.attend(q[: batch.num_tokens], spec)
        needed = launched[-1]
        lengths.clear()
        keys.append(padded.plan(batch, step.inputs))
        torch.testing.assert_close(padded.attend(q, spec)[: batch.num_tokens], expected, rtol=1e-5, atol=1e-5)
        count = len(needed.rows)
        assert launched[-1].rows.tolist()[:count] == needed.rows.tolist()
        assert set(launched[-1].rows.tolist()[count:]) <= {TOKENS}  # the last row, which is empty
        assert not launched[-1].begins[count:].any()
        for each in lengths:
            assert each == [*batch.seq_lens[: batch.num_decode], *[0] * (TOKENS + 1 - batch.num_decode)]
    assert keys[1] == keys[4] != keys[3]
    assert keys[2] not in (keys[0], keys[3])  # no graph has this name


@pytest.fixture(scope="module", params=["Qwen3ForCausalLM", "MistralForCausalLM"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Full attention, and a sliding window."""
    directory = tmp_path_factory.mktemp(request.param)
    return tiny_checkpoint(directory, request.param, head_dim=32, vocab_size=64, num_hidden_layers=1)[0]


def engine(path: Path, **options: Any) -> LLM:
    ours = {"prefill_attention": "cascade", "decode_attention": "cascade"}
    return LLM(
        path, device="cpu", dtype="float32", num_pages=48, page_size=4, max_running_requests=4, **{**ours, **options}
    )


def graphs(llm: LLM, *sizes: int) -> PrefillGraphRunner:
    """Replay the engine's steps, as on a GPU; the pages that nobody has written hold NaN."""
    llm.engine.kv_cache.k[:, :-1].fill_(torch.nan)
    runner = PrefillGraphRunner(llm.engine.runner, sizes, CpuGraph)
    llm.engine.runner = CudaGraphRunner(runner, (2, 4), CpuGraph)
    return runner


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("batch_policy", ["prefill-first", "mixed"])
@pytest.mark.parametrize("chunk", [8192, 10])
def test_the_tokens_are_those_of_an_eager_engine(path: Path, batch_policy: str, chunk: int) -> None:
    """Whole prompts and chunks, with and without decode rows, some too large for any graph."""
    options = {"batch_policy": batch_policy, "max_prefill_tokens": chunk}
    llm = engine(path, **options)
    runner = graphs(llm, 8, 24)
    sizes: Counter[tuple[int | None, bool]] = Counter()
    size_for = runner.size_for

    def watched(batch: Batch) -> int | None:
        sizes[size_for(batch), batch.num_decode > 0] += 1
        return size_for(batch)

    with patch.object(runner, "size_for", watched):
        assert tokens(llm) == tokens(engine(path, **options))
    assert len({size for size, _ in sizes}) == 2
    assert any(mixed and size is not None for size, mixed in sizes) == (batch_policy == "mixed")


@pytest.mark.parametrize("batch_policy", BATCH_POLICIES)
def test_every_step_of_a_policy_has_its_graph_and_no_graph_is_for_steps_that_it_never_has(
    path: Path, batch_policy: str
) -> None:
    llm = engine(path, batch_policy=batch_policy, max_prefill_tokens=10)
    asked: list[Any] = []

    class Watched(dict[Any, Any]):
        def get(self, key: Any, default: Any = None) -> Any:
            asked.append(key)
            return super().get(key, default)

    with patch.object(prefill_graph, "tokens_to_capture", return_value=(8, 24)):
        runner = build_prefill_runner(llm.config, llm.engine.runner, CpuGraph)
    assert isinstance(runner, PrefillGraphRunner)
    runner.graphs = Watched(runner.graphs)
    llm.engine.runner = CudaGraphRunner(runner, (2, 4), CpuGraph)
    assert tokens(llm) == tokens(engine(path, batch_policy=batch_policy, max_prefill_tokens=10))
    assert set(asked) <= set(runner.graphs)
    assert {decode_rows > 0 for _, (decode_rows, _) in runner.graphs} == {False, batch_policy == "mixed"}


def test_a_step_without_its_graph_is_computed_on_the_same_inputs(path: Path) -> None:
    """More tiles than a graph of this size has room for."""
    llm = engine(path)
    graphs(llm, 64).graphs.clear()
    assert tokens(llm) == tokens(engine(path))


def test_all_steps_of_one_key_attend_with_one_launch_in_the_same_memory(path: Path) -> None:
    """A graph holds the kernels' arguments, so these may depend on nothing but sizes and key."""
    llm = engine(path, batch_policy="mixed", max_prefill_tokens=10)
    runner = graphs(llm, 8, 24)
    attention, seen = runner.attention, {}
    assert isinstance(attention, PagedAttention)
    attend = attention.attend
    launches: list[Any] = []

    def noted(name: str) -> Any:
        def launch(*args: Any, **_: Any) -> None:
            launches.append((name, [_fixed(each) for each in args[2:]]))

        return launch

    compared = 0
    plan = attention.plan

    def watched(batch: Batch, inputs: Any) -> Any:
        nonlocal compared
        key = plan(batch, inputs)
        if inputs.padded:
            launches.clear()
            q = torch.zeros((len(inputs.positions), 4, 32))
            spec = llm.engine.model.model.layers[0].self_attn.spec
            with (
                patch("minisgl.attention.triton.backend.paged_prefill_attention", noted("prefill")),
                patch("minisgl.attention.triton.backend.paged_decode_attention", noted("decode")),
            ):
                attend(q[:, : spec.num_heads], spec)
            assert (len(q), key) in runner.graphs
            compared += (len(q), key) in seen
            assert seen.setdefault((len(q), key), launches.copy()) == launches
        return key

    with patch.object(attention, "plan", watched):
        tokens(llm)
    assert compared >= 3
    assert len(seen) >= 2


def _fixed(argument: Any) -> Any:
    """What a graph keeps of an argument: the address and size of tensors."""
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr(), tuple(argument.shape)
    slots = getattr(argument, "__slots__", None)
    return [_fixed(getattr(argument, name)) for name in slots] if slots else argument


def test_what_can_be_captured(path: Path) -> None:
    llm = engine(path)
    runner = llm.engine.runner
    torch_runner = engine(path, prefill_attention="torch", decode_attention="torch").engine.runner
    assert tokens_to_capture(EngineConfig(), runner) == ()  # there is no CUDA
    assert build_prefill_runner(EngineConfig(), runner, CpuGraph) is runner
    assert measure_prefill_memory(EngineConfig(), runner) == 0
    with patch.object(ModelRunner, "device", torch.device("cuda")):
        assert tokens_to_capture(EngineConfig(max_graph_tokens=100), runner) == (64, 100)
        assert tokens_to_capture(EngineConfig(max_prefill_tokens=64), runner) == (64,)
        for options in ({"enforce_eager": True}, {"max_graph_tokens": 0}):
            assert tokens_to_capture(EngineConfig(**options), runner) == ()
        assert tokens_to_capture(EngineConfig(), torch_runner) == ()


def test_without_memory_for_a_graph_its_steps_do_without(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def capture(work: Any) -> CpuGraph:
        result = CpuGraph(work)
        if len(result.outputs[0]) == 4 and runner_sizes.pop() == 24:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return result

    runner_sizes = [8, 8, 8, 8, 24]
    llm = engine(path)
    with caplog.at_level("WARNING", logger=prefill_graph.__name__):
        runner = PrefillGraphRunner(llm.engine.runner, (8, 24), capture)
    assert list(runner.buffers) == [8]
    assert "too little memory for a CUDA graph of 24 tokens" in caplog.text
    llm.engine.runner = runner
    assert tokens(llm) == tokens(engine(path))


@pytest.mark.parametrize("value", [-1, "64", True])
def test_the_option_is_checked(path: Path, value: Any) -> None:
    with pytest.raises(ConfigError, match="max_graph_tokens: must be None or an integer of at least 0"):
        engine(path, max_graph_tokens=value)
