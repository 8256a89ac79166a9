"""Every number of rows has a graph to go to, and padding disturbs nobody."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Hashable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import pytest
import torch

from minisgl import batch as staging
from minisgl.attention.torch_backend import TorchAttention
from minisgl.batch import Batch, DeviceBatch
from minisgl.config import EngineConfig
from minisgl.engine import build as engine_build
from minisgl.engine import cuda_graph
from minisgl.engine.cuda_graph import (
    CpuGraph,
    CudaGraphRunner,
    build_runner,
    capture_all,
    graph_sizes,
    measure_graph_memory,
    pad_batch,
    sizes_to_capture,
)
from minisgl.engine.model_runner import ModelRunner
from minisgl.engine.prefill_graph import PrefillGraphRunner
from minisgl.errors import NotEnoughMemory
from minisgl.layers.sharding import SINGLE_RANK
from minisgl.llm import LLM
from minisgl.models.fusions import fuse_layers
from minisgl.request import Int32Array
from minisgl.sampling_params import SamplingParams
from tests.kernels.closeness import DEVICE
from tests.model_zoo import tiny_checkpoint
from tests.steps import step_of


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 20, 32, 33, 100, 256, 300])
def test_every_number_of_rows_has_a_size_that_is_not_much_larger(largest: int) -> None:
    sizes = graph_sizes(largest)
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == largest
    for rows in range(1, largest + 1):
        padded = min(size for size in sizes if size >= rows)
        assert padded - rows < max(rows, 16)


def test_padded_rows_are_single_tokens_of_the_dummy_slot() -> None:
    batch, _ = step_of([1, 1, 1], [5, 9, 2])
    padded = pad_batch(batch, 8, dummy_slot=20)
    assert padded.num_rows == padded.num_decode == padded.num_tokens == 8
    assert padded.slots.tolist() == [*batch.slots.tolist(), *[20] * 5]
    assert padded.seq_lens.tolist() == [6, 10, 3, 1, 1, 1, 1, 1]
    assert padded.cu_seqlens_q.tolist() == list(range(9))
    assert np.array_equal(padded.sample_rows, batch.sample_rows)


def test_a_full_batch_is_left_alone() -> None:
    batch, _ = step_of([1, 1], [5, 9])
    assert pad_batch(batch, 2, dummy_slot=20) is batch


SIZES = (1, 2, 4, 8)
PARAMS = [
    SamplingParams(max_tokens=9, temperature=0.0),
    SamplingParams(max_tokens=20, temperature=0.7, seed=1),
    SamplingParams(max_tokens=14, temperature=1.0, top_p=0.9, seed=2),
    SamplingParams(max_tokens=17, temperature=0.0, repetition_penalty=1.3),
    SamplingParams(max_tokens=5, temperature=0.5, seed=3, logprobs=2),
]
PROMPTS = [[7, 8, 9], [1], list(range(30)), [5] * 17, [2, 4]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")[0]


def engine(path: Path, sizes: tuple[int, ...] | None, fused: bool = False) -> LLM:
    llm = LLM(
        path,
        device=DEVICE,
        dtype="float64",
        num_pages=64,
        page_size=4,
        max_running_requests=8,
        prefill_attention="torch",
        decode_attention="torch",
        enforce_eager=True,
        fusions=(),
        sampler="default",
    )
    if sizes is not None:
        llm.engine.runner = CudaGraphRunner(llm.engine.runner, sizes, CpuGraph, fused)
    return llm


def tokens(llm: LLM) -> list[list[int]]:
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.mark.parametrize("sizes", [SIZES, (8,), (3,), (1, 5)])
@pytest.mark.parametrize("fused", [False, True])
def test_the_tokens_are_those_of_an_eager_engine(path: Path, sizes: tuple[int, ...], fused: bool) -> None:
    assert tokens(engine(path, sizes, fused)) == tokens(engine(path, None))


def test_logprobs_come_from_the_replayed_logits(path: Path) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=3)
    eager, replayed = (engine(path, sizes).generate([[3, 1, 4]], params)[0].logprobs for sizes in (None, SIZES))
    assert eager is not None
    assert replayed == eager


def test_every_size_is_recorded_once_largest_first(path: Path) -> None:
    runner = engine(path, SIZES).engine.runner
    assert isinstance(runner, CudaGraphRunner)
    assert [size for size, _ in runner.graphs] == [8, 4, 2, 1]


def test_steps_that_no_graph_holds_run_eagerly(path: Path) -> None:
    llm = engine(path, (2,))
    runner = llm.engine.runner
    assert isinstance(runner, CudaGraphRunner)
    sizes: list[int | None] = []
    size_for = runner.size_for

    def watched(batch: Batch) -> int | None:
        sizes.append(size_for(batch))
        return sizes[-1]

    with patch.object(runner, "size_for", watched):
        assert tokens(llm) == tokens(engine(path, None))
    assert {None, 2} == set(sizes)


def test_a_sampler_that_cannot_be_captured_samples_after_the_replay(path: Path) -> None:
    llm = engine(path, None)
    llm.engine.runner.sampler.capturable = False
    llm.engine.runner = CudaGraphRunner(llm.engine.runner, SIZES, CpuGraph)
    assert tokens(llm) == tokens(engine(path, None))


@pytest.mark.parametrize(
    ("params", "beside_the_buffers"),
    [
        (SamplingParams(max_tokens=4, ignore_eos=True, seed=1), []),
        (SamplingParams(max_tokens=4, ignore_eos=True, seed=1, top_k=5, frequency_penalty=0.5), [["step", "stages"]]),
    ],
    ids=["in the graph", "after the replay"],
)
def test_what_is_sampled_after_the_replay_came_with_the_step(
    path: Path, params: SamplingParams, beside_the_buffers: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step has one copy from the host: into the buffers, or, with all that its sampling needs, to new memory."""
    sent: list[list[str]] = []
    of_steps: list[list[list[str]]] = []

    def noted(arrays: Mapping[str, Int32Array], device: torch.device) -> dict[str, torch.Tensor]:
        sent.append(list(arrays))
        return to_device(arrays, device)

    to_device = staging.to_device
    llm = engine(path, (2,))
    runner = llm.engine.runner
    assert isinstance(runner, CudaGraphRunner)
    run = runner.run

    def watched(batch: Batch, rows: Any) -> Any:
        sent.clear()
        result = run(batch, rows)
        if runner.size_for(batch) is not None:
            of_steps.append(sent.copy())
        return result

    for module in list(sys.modules.values()):
        if getattr(module, "to_device", None) is to_device:
            monkeypatch.setattr(module, "to_device", noted)
    monkeypatch.setattr(runner, "run", watched)
    outputs = llm.generate([[7, 8, 9], [1, 2]], params)
    assert [output.finish_reason for output in outputs] == ["length"] * 2
    assert of_steps == [beside_the_buffers] * 3


CONFIG = EngineConfig(graph_batches=SIZES)


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Callable[[LLM, bool], ModelRunner]:
    """What `build_runner` builds over an attention backend that can be captured, or cannot, as if there were CUDA."""
    monkeypatch.setattr("minisgl.engine.cuda_graph.CudaGraphCapture", lambda device: CpuGraph)

    def build(llm: LLM, attention: bool) -> ModelRunner:
        monkeypatch.setattr(llm.engine.runner.attention, "capturable", attention)
        with patch.object(ModelRunner, "device", torch.device("cuda")):
            return build_runner(CONFIG, llm.engine.runner)

    return build


def test_graphs_need_an_attention_backend_that_can_be_captured(path: Path, build: Any) -> None:
    llm = engine(path, None)
    assert type(build(llm, attention=True)) is CudaGraphRunner
    assert type(build(llm, attention=False)) is ModelRunner


def test_graphs_need_layers_that_can_be_captured(tmp_path: Path, build: Any) -> None:
    """The plain experts wait for the device; as grouped products they do not."""
    llm = engine(tiny_checkpoint(tmp_path, "Qwen3MoeForCausalLM")[0], None)
    expected = tokens(llm)
    assert build(llm, attention=True) is llm.engine.runner
    fuse_layers(llm.engine.model, {"experts"})
    llm.engine.runner = build(llm, attention=True)
    assert type(llm.engine.runner) is CudaGraphRunner
    assert tokens(llm) == expected


def test_without_cuda_steps_run_eagerly_and_graphs_take_no_memory(path: Path) -> None:
    runner = engine(path, None).engine.runner
    sizes = sizes_to_capture(CONFIG, runner)
    assert sizes == ()
    assert build_runner(CONFIG, runner) is runner
    assert measure_graph_memory(runner, sizes) == 0


class NamesItsSteps(TorchAttention):
    """Has two kinds of steps: with a row of more than 20 tokens, and without."""

    def plan(self, batch: Batch, inputs: DeviceBatch) -> Hashable:
        super().plan(batch, inputs)
        return "long" if batch.max_seq_len > 20 else "short"


def test_each_name_of_a_step_has_its_own_graph(path: Path) -> None:
    llm = engine(path, None)
    backend = NamesItsSteps(llm.engine.kv_cache)
    llm.engine.runner.attention = backend
    llm.engine.runner = runner = CudaGraphRunner(llm.engine.runner, SIZES, CpuGraph)
    assert {name for _, name in runner.graphs} == {"long", "short"}
    assert tokens(llm) == tokens(engine(path, None))


def test_padding_leaves_the_pages_of_requests_alone(path: Path) -> None:
    llm = engine(path, (8,))
    llm.engine.kv_cache.k[:, :-1].fill_(torch.nan)
    assert tokens(llm) == tokens(engine(path, None))


def test_captures_are_logged_from_the_largest_down(caplog: pytest.LogCaptureFixture) -> None:
    captured: list[int] = []
    with caplog.at_level(logging.INFO, "minisgl.engine.cuda_graph"):
        capture_all("rows", captured.append, (1, 8, 4), torch.device("cpu"))
    assert captured == [8, 4, 1]
    begins = [line.split(",")[0] for line in caplog.messages]
    assert begins == ["graph 1 of 3: 8 rows", "graph 2 of 3: 4 rows", "graph 3 of 3: 1 rows"]
    assert all(line.endswith("GB free") for line in caplog.messages)


class Terminal(io.StringIO):
    """Says that it is one."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("stderr", "level", "bar"), [(Terminal, "INFO", True), (Terminal, "WARNING", False), (io.StringIO, "INFO", False)]
)
def test_a_terminal_that_is_told_sees_a_bar(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, stderr: type[io.StringIO], level: str, bar: bool
) -> None:
    monkeypatch.setattr(sys, "stderr", stderr())
    with caplog.at_level(level, "minisgl.engine.cuda_graph"):
        capture_all("rows", lambda size: None, (1, 8, 4), torch.device("cpu"))
    shown = sys.stderr.getvalue()
    assert ("graphs by rows: 100%" in shown and "3/3" in shown) if bar else shown == ""


def test_without_memory_for_a_graph_its_rows_take_a_larger_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    with LLM(str(path), device="cpu", num_pages=64, max_seq_len=64) as llm:
        full = [8, 2]  # sizes for which there is no memory

        def capture(work: Any) -> CpuGraph:
            graph = CpuGraph(work)
            if len(graph.outputs[0]) in full:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph

        with caplog.at_level("WARNING", logger=cuda_graph.__name__):
            runner = CudaGraphRunner(llm.engine.runner, (1, 2, 4, 8), capture)
        assert sorted(runner.buffers) == sorted({rows for rows, _ in runner.graphs}) == [1, 4]
        assert "too little memory for a CUDA graph of 2 rows" in caplog.text
        assert [runner.size_for(step_of([1] * rows, [5] * rows)[0]) for rows in (1, 2, 5)] == [1, 4, None]
        # Another rank would wait for what this one leaves out.
        llm.engine.runner.model.communicator = Mock(size=2)
        with pytest.raises(torch.OutOfMemoryError):
            runner.capture(8)
        with pytest.raises(torch.OutOfMemoryError):
            PrefillGraphRunner(llm.engine.runner, (8,), Mock(side_effect=torch.OutOfMemoryError))


def test_without_memory_for_pages_beside_all_graphs_there_are_fewer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    monkeypatch.setattr(
        engine_build, "sizes_to_capture", lambda config, runner: graph_sizes(config.max_graph_batch or 8)
    )
    monkeypatch.setattr(engine_build, "measure_graph_memory", lambda _, sizes: 1 << 60 if 8 in sizes else 0)
    with (
        caplog.at_level("WARNING", logger=engine_build.__name__),
        LLM(str(path), device="cpu", max_seq_len=64, memory_ratio=0.01) as llm,
    ):
        assert (llm.engine.config.max_graph_batch, llm.engine.config.max_graph_tokens) == (1, 0)
        assert len(llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))) == 1
    assert "only steps of one row get one" in caplog.text
    tried: list[int] = []
    monkeypatch.setattr(engine_build, "measure_graph_memory", lambda _, sizes: tried.append(max(sizes)) or 1 << 60)
    with pytest.raises(NotEnoughMemory):
        LLM(str(path), device="cpu", max_seq_len=64, memory_ratio=0.01)
    assert tried == [8, 1]
    ranks = Mock(wraps=SINGLE_RANK, size=2, rank=0)
    with pytest.raises(NotEnoughMemory):  # the other rank would not measure a second time
        engine_build.build_engine(EngineConfig(device="cpu", max_seq_len=64, memory_ratio=0.01), path, ranks)
    assert tried == [8, 1, 8]
