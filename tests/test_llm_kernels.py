"""An engine on our own kernels, from end to end: interpreted where there is no GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from minisgl.batch import DeviceBatch
from minisgl.config import EngineConfig
from minisgl.context import AttentionChoice
from minisgl.engine.cuda_graph import CpuGraph, CudaGraphRunner, build_runner
from minisgl.engine.model_runner import ModelRunner
from minisgl.errors import ConfigError
from minisgl.llm import LLM
from minisgl.models.single_token import SingleTokenDecoder
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint

PROMPTS = [[5, 6, 7] * 4, [5, 6, 7] * 4 + [1, 2], [9]]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=3),
    SamplingParams(temperature=0.8, seed=4, max_tokens=4),
    SamplingParams(temperature=0.0, max_tokens=6),
]
PLAIN: dict[str, Any] = {"prefill_attention": "torch", "decode_attention": "torch", "fusions": (), "sampler": "default"}
OURS: dict[str, Any] = {
    "prefill_attention": "cascade",
    "decode_attention": "cascade",
    "fusions": ("norm", "rope", "activation", "single-token"),
    "sampler": "triton",
    "overlap": True,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("model"), "Qwen3ForCausalLM", head_dim=32, vocab_size=64)[0]


def engine(path: Path, **options: Any) -> LLM:
    return LLM(path, device="cpu", dtype="float32", num_pages=32, page_size=4, max_running_requests=4, **options)


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_the_tokens_are_those_of_plain_pytorch(path: Path, monkeypatch: pytest.MonkeyPatch, kv_dtype: str) -> None:
    """With graphs, whose replays are run again, and the single-token decoder for the last request's steps."""
    monkeypatch.setattr("minisgl.engine.build.prepack_weights", lambda model: None)  # row-major weights, as on a GPU
    plain, llm = engine(path, **PLAIN, kv_dtype=kv_dtype), engine(path, **OURS, kv_dtype=kv_dtype)
    expected = [output.token_ids for output in plain.generate(PROMPTS, PARAMS)]
    eager = llm.engine.runner
    assert SingleTokenDecoder.supports(eager.model)
    single = SingleTokenDecoder(eager.model, eager.kv_cache)
    llm.engine.runner = runner = CudaGraphRunner(eager, (1, 3), CpuGraph, fused=True, single_row=single)
    assert (runner.model_for(1), runner.model_for(3)) == (single, eager.model)
    steps: list[int] = []

    def counted(rows: int) -> Callable[[DeviceBatch], torch.Tensor]:
        steps.append(rows)
        return single if rows == 1 else eager.model

    monkeypatch.setattr(runner, "model_for", counted)
    assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected
    assert steps.count(1) >= 2
    assert steps.count(3) >= 2


@pytest.mark.parametrize(
    ("fusions", "kinds"),
    [
        ((), ["Qwen3", "Qwen3"]),
        (("norm", "rope"), ["Qwen3", "Qwen3"]),
        (("single-token",), ["SingleTokenDecoder", "Qwen3"]),
        (("single-token", "persistent"), ["PersistentDecoder", "Qwen3"]),
    ],
)
def test_a_number_of_rows_has_its_decoder(
    path: Path, monkeypatch: pytest.MonkeyPatch, fusions: tuple[str, ...], kinds: list[str]
) -> None:
    monkeypatch.setattr("minisgl.engine.build.prepack_weights", lambda model: None)
    monkeypatch.setattr("minisgl.engine.cuda_graph.CudaGraphCapture", lambda device: CpuGraph)
    monkeypatch.setattr("minisgl.engine.cuda_graph.free_memory", lambda device: 0)  # of a GPU, for the log
    eager = engine(path).engine.runner
    monkeypatch.setattr(eager.attention, "capturable", True)
    with patch.object(ModelRunner, "device", torch.device("cuda")):
        runner = build_runner(EngineConfig(graph_batches=(1, 2)), eager, fusions)
    assert isinstance(runner, CudaGraphRunner)
    assert [type(runner.model_for(rows)).__name__ for rows in (1, 2)] == kinds


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"fusions": ("norm", "everything")}, "fusions: unknown name 'everything'"),
        ({"fusions": 3}, "fusions"),
        ({"graph_batches": ()}, "graph_batches"),
        ({"graph_batches": (4, 0)}, "graph_batches"),
        ({"graph_batches": (4, 8), "max_graph_batch": 16}, "graph_batches: the largest is 8"),
        ({"max_graph_batch": 0}, "max_graph_batch"),
        ({"sampler": "quantum"}, "sampler"),
        ({"prefill_attention": "cascade,triton"}, "prefill_attention: unknown name 'cascade,triton'"),
        ({"decode_attention": "warp"}, "decode_attention"),
        ({"overlap": "yes"}, "overlap"),
        ({"enforce_eager": 1}, "enforce_eager"),
        ({"prefill_attention": "triton", "decode_attention": "triton", "dtype": "float64"}, "choose 'torch'"),
        (
            {"prefill_attention": "triton", "decode_attention": "triton", "dtype": "float64", "kv_dtype": "fp8"},
            "choose 'torch'",
        ),
        ({"kv_dtype": "int4"}, "kv_dtype: must be one of auto, fp8, got 'int4'"),
    ],
)
def test_an_option_that_cannot_work_is_named(path: Path, options: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError, match=field):
        LLM(path, **{"device": "cpu", "dtype": "float32", "num_pages": 8, **options})


def test_the_engine_says_which_attention_backend_it_chose_and_why(path: Path) -> None:
    assert engine(path).attention_backend.name == "torch"
    assert "CPU" in engine(path).attention_backend.reason
    asked = engine(path, prefill_attention="triton", decode_attention="triton")
    assert asked.attention_backend == AttentionChoice("triton", "triton", "it was asked for")
