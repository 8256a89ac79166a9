"""Layers that torch.compile has compiled compute what the plain ones do, for any number of tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

from minisgl.engine.cuda_graph import CudaGraphRunner
from minisgl.engine.sampler import CompiledSampler
from minisgl.errors import ConfigError
from minisgl.layers.attention import Attention
from minisgl.layers.compiled import CompiledAttention, CompiledGatedMLP, CompiledRMSNorm
from minisgl.layers.fused import FusedRMSNorm
from minisgl.layers.mlp import GatedMLP
from minisgl.layers.norm import RMSNorm
from minisgl.llm import LLM
from minisgl.models.fusions import compile_layers, fuse_layers, select_fusions
from minisgl.outputs import RequestOutput
from minisgl.sampling_params import SamplingParams
from tests.model_zoo import tiny_checkpoint
from tests.models.test_fusions import load, steps
from tests.test_gpu import agreeing_until_a_tie

CPU = torch.device("cpu")


def test_logits_are_those_of_the_plain_model(tmp_path: Path) -> None:
    """A prefill, a chunk with a decode row, and decode steps of two rows and of one."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM")
    model, config = load(path)
    expected = steps(model, config)
    parameters = {name: parameter.data_ptr() for name, parameter in model.named_parameters()}
    compile_layers(model)
    counters.clear()
    for ours, plain in zip(steps(model, config), expected, strict=True):
        torch.testing.assert_close(ours, plain, rtol=2e-5, atol=2e-5)
    assert not {RMSNorm, GatedMLP, Attention} & {type(module) for module in model.modules()}
    assert {name: parameter.data_ptr() for name, parameter in model.named_parameters()} == parameters
    assert counters["stats"]["unique_graphs"] > 0
    assert not counters["graph_break"]


def test_what_has_a_kernel_of_its_own_keeps_it(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    model, _ = load(path)
    fuse_layers(model, {"norm", "compile"})
    compile_layers(model)
    kinds = {type(module) for module in model.modules()}
    assert {FusedRMSNorm, CompiledAttention, CompiledGatedMLP} <= kinds
    assert CompiledRMSNorm not in kinds


PROMPTS = [[5, 6, 7] * 6, [9], list(range(20))]
PARAMS = [
    SamplingParams(temperature=temperature, top_k=top_k, seed=3, max_tokens=8, ignore_eos=True)
    for temperature, top_k in ((0.8, 0), (0.0, 0), (1.2, 9))
]


def test_an_engine_gives_the_tokens_of_the_plain_one(tmp_path: Path) -> None:
    path, _ = tiny_checkpoint(tmp_path, "LlamaForCausalLM")
    options: dict[str, Any] = {"device": "cpu", "num_pages": 64, "max_running_requests": 3}
    plain = LLM(path, **options).generate(PROMPTS, PARAMS)
    llm = LLM(path, **options, fusions=("compile",))
    assert isinstance(llm.engine.runner.sampler, CompiledSampler)
    assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS)] == [each.token_ids for each in plain]


def test_on_a_cpu_the_sampler_is_plain_also_beside_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device of the logits counts: an engine on the CPU may run on a machine that has a GPU."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", num_hidden_layers=1)
    torch._dynamo.reset()
    counters.clear()
    with LLM(path, device="cpu", num_pages=64, fusions=(), sampler="compile") as llm:
        assert isinstance(llm.engine.runner.sampler, CompiledSampler)
        (answer,) = llm.generate(PROMPTS[:1], PARAMS[:1])
    assert len(answer.token_ids) > 1
    assert counters["stats"]["unique_graphs"] == 0


def test_a_missing_compiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ConfigError, match=r"'compile' needs a C\+\+ compiler and there is no no-such-compiler"):
        select_fusions(["compile"], CPU)
    monkeypatch.setattr("minisgl.models.fusions.has_triton", lambda: False)
    monkeypatch.delenv("CXX")
    assert select_fusions(["compile"], CPU) == ("compile",)
    with pytest.raises(ConfigError, match="Triton is not installed"):
        select_fusions(["compile"], torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_all_is_compiled_before_the_first_request(tmp_path: Path, dtype: str) -> None:
    """Graphs hold the compiler's kernels: the tokens are those of plain layers, and no step compiles any more."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=64, num_hidden_layers=1)
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 256, "max_running_requests": 8}
    plain = LLM(path, **options, fusions=(), sampler="default").generate(PROMPTS, PARAMS)
    llm = LLM(path, **options, fusions=("compile",))
    assert isinstance(llm.engine.runner, CudaGraphRunner)
    compiled = counters["stats"]["unique_graphs"]
    outputs = llm.generate(PROMPTS, PARAMS)
    assert counters["stats"]["unique_graphs"] == compiled > 0
    if dtype == "float32":
        assert [each.token_ids for each in outputs] == [each.token_ids for each in plain]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_on_a_gpu_the_compiled_sampler_draws_what_the_plain_one_draws(tmp_path: Path, dtype: str) -> None:
    """One row is random and one greedy: with a top-k in the batch, all rows would go to the plain sampler. Compiled
    layers round bfloat16 elsewhere, so a greedy answer may depart where the best two were about equal."""
    path, _ = tiny_checkpoint(tmp_path, "Qwen3ForCausalLM", head_dim=64, num_hidden_layers=1)
    options: dict[str, Any] = {"device": "cuda", "dtype": dtype, "num_pages": 256, "max_running_requests": 8}

    def answers(**others: Any) -> list[RequestOutput]:
        with LLM(path, **options, **others) as llm:
            return llm.generate(PROMPTS[:2], [replace(params, logprobs=2) for params in PARAMS[:2]])

    plain = answers(fusions=(), sampler="default")
    torch._dynamo.reset()  # or what another engine of this process had compiled would be used again, and not be counted
    counters.clear()
    drawn, compiled = answers(fusions=(), sampler="compile"), counters["stats"]["unique_graphs"]
    assert compiled > 0, "nothing but the sampler is compiled here"
    assert [each.token_ids for each in drawn] == [each.token_ids for each in plain]
    both = answers(fusions=("compile",))
    assert agreeing_until_a_tie(both[1:], plain[1:], tie=0.01 if dtype == "float32" else 0.5) > 0
    assert dtype == "bfloat16" or both[0].token_ids == plain[0].token_ids
